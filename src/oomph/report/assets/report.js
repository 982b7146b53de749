// Renders the JSON object in #data. Strings of the user's program are set as text, never as markup.
"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const state = {
  run: data.runs.length - 1, moment: 0, view: "tensors", query: "", hidden: new Set(), sort: "bytes", descending: true,
  all: false, gpu: -1,
};
const charts = {};

// ---------------------------------------------------------------------------------------------- helpers

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

function size(bytes, unitOf = bytes) {
  const sign = bytes < 0 ? "-" : "";
  let value = Math.abs(bytes), limit = Math.abs(unitOf);
  for (const unit of ["B", "KiB", "MiB"]) {
    if (limit < 1024) return sign + (unit === "B" ? value : value.toFixed(1)) + " " + unit;
    value /= 1024; limit /= 1024;
  }
  return sign + value.toFixed(1) + " GiB";
}
const signed = (bytes) => (bytes > 0 ? "+" : "") + size(bytes);
const share = (part, whole) => (whole ? (100 * part / whole).toFixed(part / whole < 0.1 ? 1 : 0) : "0") + " %";
const seconds = (value) => value < 1 ? (1000 * value).toFixed(1) + " ms" : value.toFixed(2) + " s";
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const stageColour = (stage) => colour("--s" + stage);
const dot = (stage) => el("span", { class: "dot", style: { background: `var(--s${stage})` } });
const current = () => data.runs[state.run];

// ------------------------------------------------------------------------------- what is alive at a moment

for (const run of data.runs) {
  // Bytes by stage after each sampled moment; and the moment with the most bytes.
  const totals = new Array(data.stages.length).fill(0);
  run.byStage = run.moments.map(([, , , changes]) => {
    for (let i = 0; i < changes.length; i += 3) totals[run.rows[run.groups[changes[i]][0]][4]] += changes[i + 2];
    return totals.slice();
  });
  run.totals = run.byStage.map((stages) => stages.reduce((a, b) => a + b, 0));
  run.peakMoment = run.failed ? run.moments.length - 1 : run.totals.reduce((best, value, i) => (value > run.totals[best] ? i : best), 0);
  run.whole = run.moments.length > 1 || run.line.length < 2;  // otherwise only the tensors at the peak are known
}
state.moment = current() ? current().peakMoment : 0;

function alive(run, moment) {
  const bytes = new Float64Array(run.groups.length), count = new Int32Array(run.groups.length);
  for (let m = 0; m <= moment && m < run.moments.length; m++) {
    const changes = run.moments[m][3];
    for (let i = 0; i < changes.length; i += 3) { count[changes[i]] += changes[i + 1]; bytes[changes[i]] += changes[i + 2]; }
  }
  return { bytes, count };
}

// What is alive, as { row, op, module, site, bytes, count }: without hidden stages, and only what the search matches.
function visible(run, moment) {
  const { bytes, count } = alive(run, moment), query = state.query.toLowerCase(), found = [];
  for (let g = 0; g < bytes.length; g++) {
    const [rowIndex, moduleIndex, opIndex] = run.groups[g], row = run.rows[rowIndex];
    if ((!count[g] && !bytes[g]) || state.hidden.has(row[4])) continue;
    const site = run.sites[row[3]], module = run.modules[moduleIndex], op = run.ops[opIndex];
    const texts = [...row.slice(0, 3), op, module, data.stages[row[4]], ...(site || [])];
    if (texts.some((text) => text.toLowerCase().includes(query))) found.push({ rowIndex, row, op, module, site, bytes: bytes[g], count: count[g] });
  }
  return found;
}

// The same by tensor, module or line: { key, row, ops, modules, site, bytes, count, stages }.
function entries(run, moment, view) {
  const found = new Map();
  for (const { rowIndex, row, op, module, site, bytes, count } of visible(run, moment)) {
    const key = view === "tensors" ? rowIndex : view === "modules" ? module : site ? site[0] : "";
    if (!found.has(key)) found.set(key, { key, row, ops: new Set(), modules: new Set(), site, bytes: 0, count: 0, stages: new Array(data.stages.length).fill(0) });
    const one = found.get(key);
    one.ops.add(op); one.modules.add(module); one.bytes += bytes; one.count += count; one.stages[row[4]] += bytes;
  }
  return [...found.values()];
}
// A row names its modules of all moments.
function modulesAlive(run, one) {
  const all = new Set(run.groups.filter(([row]) => row === one.key).map((group) => group[1])), alive = one.modules.size;
  return alive === 1 ? [...one.modules][0] : alive < all.size ? `${alive} of ${one.row[2]}` : one.row[2];
}
const mainStage = (one) => one.stages.indexOf(Math.max(...one.stages));

function phaseAt(run, event) {
  let step = run.phases.length ? "before the first step" : "", part = "";
  for (const [at, label] of run.phases) {
    if (at > event) break;
    if (label.startsWith("step")) { step = label; part = ""; } else part = label;
  }
  return part ? `${step}, ${part}` : step;
}

// ---------------------------------------------------------------------------------------------- verdict

// It fits, although the allocator would reserve more than there is.
const releases = (run) => run.outcome.startsWith("fits, but");

function verdictSection() {
  if (data.plan && !data.runs.length) return null;
  const run = data.runs[data.runs.length - 1];
  const tone = ["does not fit", "ran out of memory"].includes(run.outcome) ? "bad" : run.outcome === "fits" ? "good" : run.outcome === "needs" || run.outcome === "peaked at" ? "" : "warn";
  const heading = tone ? run.outcome + (data.plan && data.runs.length > 1 ? " with the plan" : "") : `${run.outcome} ${size(run.outcome === "needs" ? run.needed : run.peak.allocated)}`;
  const figures = [
    run.peak.device > run.peak.reserved ? [size(run.needed), releases(run) ? "without releasing cached memory" : "needed, with CUDA context"] : null,
    run.capacity ? [size(run.capacity), run.gpu + " has"] : run.limit ? [size(run.limit), "limit of the allocator"] : null,
    [size(run.peak.allocated), "allocated by tensors"],
    [size(run.peak.reserved), releases(run) ? "reserved if nothing is released" : "reserved by the allocator"],
    run.margin ? ["± " + size(run.margin), "margin"] : null,
    run.stepSeconds ? [seconds(run.stepSeconds), "per step, estimated"] : null,
  ];
  const widest = Math.max(...data.runs.map((one) => Math.max(one.peak.device, one.capacity || one.limit || 0)));
  return el("section", { id: "verdict", class: "verdict " + tone },
    el("h1", {}, heading),
    el("p", { class: "details wrap" }, run.details),
    run.outOfMemory ? el("p", { class: "oom wrap" }, run.outOfMemory) : null,
    run.assumptions.map((text) => el("p", { class: "assumed wrap" }, text)),
    el("div", { class: "figures" }, figures.filter(Boolean).map(([value, label]) => el("div", {}, el("b", { class: "num" }, value), el("span", {}, label)))),
    el("div", { class: "bars" }, data.runs.map((one) => peakBar(one, widest))));
}

function peakBar(run, widest) {
  const stages = run.byStage[run.peakMoment] || [];
  const cached = Math.max(0, run.peak.reserved - run.peak.allocated), context = run.peak.device - run.peak.reserved - run.nccl;
  const parts = [
    ...stages.map((bytes, i) => [data.stages[i], bytes, `var(--s${i})`]),
    ["cached or fragmented", cached, "var(--cached)"],
    ["CUDA context", context, "var(--context)"],
    ["NCCL, estimated", run.nccl, "var(--s9)"],
  ];
  const has = run.capacity || run.limit;
  const title = data.runs.length > 1 ? run.title : run.failed ? "When memory ran out" : "At the peak";
  return el("div", {},
    el("div", { class: "bar-title" }, el("span", {}, title), el("span", { class: "num" }, has ? `${size(run.peak.device)} ${releases(run) ? "without releasing cached memory," : "of"} ${size(has)}${releases(run) ? " there" : ""}` : size(run.peak.device))),
    el("div", { class: "bar", role: "img", "aria-label": parts.filter((p) => p[1] > 0).map(([name, bytes]) => `${name} ${size(bytes)}`).join(", ") },
      parts.filter((p) => p[1] > 0).map(([name, bytes, fill]) => el("i", { title: `${name}: ${size(bytes)}`, style: { width: 100 * bytes / widest + "%", background: fill } })),
      has ? el("span", { class: "limit", title: `limit ${size(has)}`, style: { left: `min(100% - 2px, ${100 * has / widest}%)` } }) : null),
    el("div", { class: "legend" }, parts.filter((p) => p[1] > 0.002 * run.peak.device).map(([name, bytes, fill]) =>
      el("span", {}, el("i", { class: "dot", style: { background: fill } }), ` ${name} `, el("b", { class: "num" }, size(bytes))))));
}

// ------------------------------------------------------------------------------------------ memory chart

function memorySection() {
  if (!data.runs.length) return null;
  const limits = el("select", { id: "gpu", "aria-label": "GPU limit", onchange: (event) => { state.gpu = Number(event.target.value); drawMemory(); } },
    el("option", { value: -1 }, "limit: as predicted"), el("option", { value: -2 }, "no limit"),
    data.gpus.map(([title, memory], i) => el("option", { value: i }, `${title} (${size(memory)})`)));
  const runs = data.runs.length < 2 ? null : tabs("run", data.runs.map((run, i) => [i, run.title]), state.run, (value) => {
    state.run = value; state.moment = current().peakMoment; drawMemory(); drawAlive();
  });
  const chart = el("div", { class: "chart", id: "memory-chart", tabindex: 0, role: "slider", "aria-label": "moment of the run", onkeydown: moveMoment });
  const used = data.stages.map((_, i) => i).filter((i) => data.runs.some((run) => run.byStage.some((stages) => stages[i] > 0)));
  return el("section", { id: "memory" },
    el("header", {}, el("h2", {}, "Memory over the run"), runs, limits, el("span", { id: "limit-answer", class: "soft" }),
      el("button", { id: "to-peak", onclick: () => select(current().peakMoment) }, "Go to peak")),
    chart,
    el("div", { class: "chips" }, used.map((i) => el("button", { class: "chip", "aria-pressed": "true", "data-stage": i, onclick: (event) => {
      state.hidden.has(i) ? state.hidden.delete(i) : state.hidden.add(i);
      event.currentTarget.setAttribute("aria-pressed", String(!state.hidden.has(i)));
      drawMemory(); drawAlive();
    } }, el("i", { style: { background: `var(--s${i})` } }), data.stages[i])), el("span", { class: "chip soft" }, "┄ reserved by the allocator")));
}

function tabs(name, options, selected, choose) {
  const bar = el("div", { class: "tabs", role: "tablist", "aria-label": name });
  options.forEach(([value, label]) => bar.append(el("button", { role: "tab", "aria-selected": String(value === selected), "data-value": value, onclick: (event) => {
    for (const other of bar.children) other.setAttribute("aria-selected", String(other === event.currentTarget));
    choose(value);
  } }, label)));
  return bar;
}

function moveMoment(event) {
  const last = current().moments.length - 1;
  const to = { ArrowLeft: state.moment - 1, ArrowRight: state.moment + 1, PageUp: state.moment - 10, PageDown: state.moment + 10, Home: 0, End: last, p: current().peakMoment }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  select(to);
}

function select(moment) {
  state.moment = Math.max(0, Math.min(current().moments.length - 1, moment));
  drawMemory(); drawAlive();
}

function limitOf(run) {
  if (state.gpu >= 0) return { title: data.gpus[state.gpu][0], bytes: data.gpus[state.gpu][2] };
  return state.gpu === -1 && run.limit ? { title: run.gpu || "limit", bytes: run.limit } : null;
}

function theme() {
  return { ink: colour("--ink"), soft: colour("--soft"), faint: colour("--faint"), rule: colour("--rule"), card: colour("--card"), bad: colour("--bad"), accent: colour("--accent") };
}

function chart(id) {
  const node = document.getElementById(id);
  if (!charts[id]) charts[id] = echarts.init(node, null, { renderer: "canvas" });
  return charts[id];
}

const tooltip = (t) => ({
  backgroundColor: t.card, borderColor: t.rule, textStyle: { color: t.ink, fontSize: 12 }, confine: true,
  extraCssText: "box-shadow:0 6px 24px rgb(0 0 0 / .18);border-radius:10px",
});
const memoryAxis = (t, top) => ({
  type: "value", min: 0, max: top * 1.08, interval: niceInterval(top), splitLine: { lineStyle: { color: t.rule } },
  axisLabel: { color: t.soft, formatter: (v) => v ? size(v, top) : "0", showMaxLabel: false },
});

function drawMemory() {
  const run = current(), t = theme(), limit = limitOf(run), area = chart("memory-chart");
  const at = run.moments.map((moment) => moment[0]);
  const base = { type: "line", symbol: "none", animation: false, silent: true };
  const series = run.whole ? data.stages.map((name, stage) => ({
    ...base, name, stack: "memory", lineStyle: { width: 0 }, areaStyle: { color: stageColour(stage), opacity: 0.92 },
    itemStyle: { color: stageColour(stage) },
    data: state.hidden.has(stage) ? [] : run.byStage.map((stages, i) => [at[i], stages[stage]]),
  })).filter((one) => one.data.some(([, bytes]) => bytes > 0)) : [{
    ...base, name: "allocated", data: run.line, lineStyle: { color: stageColour(0) }, areaStyle: { color: stageColour(0), opacity: 0.3 },
  }];
  if (run.whole) series.push({ ...base, name: "reserved", data: run.moments.map(([event, reserved]) => [event, reserved]), lineStyle: { color: t.soft, width: 1, type: [3, 3] } });
  data.runs.forEach((other, i) => {
    if (i !== state.run) series.push({ ...base, name: other.title, data: stretched(other, run), lineStyle: { color: t.accent, width: 1.5 } });
  });
  const peakAt = at[run.peakMoment], peak = run.totals[run.peakMoment] || 0, chosen = at[state.moment];
  const end = Math.max(run.events - 1, at[at.length - 1] || 1, (run.line[run.line.length - 1] || [1])[0]);
  const steps = run.phases.filter(([, label]) => label.startsWith("step"));
  series.push({
    ...base, name: "marks", data: [[0, 0]],
    markLine: {
      silent: true, symbol: "none", animation: false, label: { color: t.soft, fontSize: 11 },
      data: [
        ...steps.map(([event, label]) => ({
          xAxis: event, lineStyle: { color: t.faint, type: "dotted", opacity: 0.7 },
          label: { formatter: label, position: "insideEndTop", rotate: 0, align: "left", distance: [-5, -14] },
        })),
        ...(limit ? [{
          yAxis: limit.bytes, lineStyle: { color: t.bad, width: 1.5, type: "dashed" },
          label: { formatter: `${limit.title}: ${size(limit.bytes)} for the allocator`, position: "insideStartBottom", color: t.bad, fontWeight: 600 },
        }] : []),
        ...(run.whole ? [{ xAxis: chosen, lineStyle: { color: t.ink, width: 1.5, type: "solid" }, label: { show: false } }] : []),
      ],
    },
    markPoint: {
      silent: true, animation: false, symbol: "circle", symbolSize: 9, itemStyle: { color: t.ink, borderColor: t.card, borderWidth: 2 },
      data: [{ coord: [peakAt ?? run.line[0]?.[0] ?? 0, peak] }],
      label: {
        show: true, formatter: `${run.failed ? "out of memory" : "peak"} ${size(run.peak.allocated)}`, position: peakAt > 0.8 * end ? "left" : "right",
        color: t.ink, fontWeight: 700, fontSize: 12, textBorderColor: t.card, textBorderWidth: 3, distance: 8,
      },
    },
  });
  const top = Math.max(run.peak.reserved, limit && limit.bytes < 2.2 * run.peak.reserved ? limit.bytes : 0, ...data.runs.map((one) => one.peak.allocated));
  area.setOption({
    animation: false, aria: { enabled: false },
    grid: { left: 66, right: 14, top: 26, bottom: 26 },
    xAxis: {
      type: "value", min: 0, max: end, axisLine: { lineStyle: { color: t.rule } }, axisTick: { show: false }, splitLine: { show: false },
      axisLabel: { color: t.faint, formatter: (v) => v.toLocaleString("en"), hideOverlap: true },
      name: "events in program order", nameLocation: "middle", nameGap: 22, nameTextStyle: { color: t.faint, fontSize: 11 },
    },
    yAxis: memoryAxis(t, top),
    tooltip: { trigger: "axis", ...tooltip(t), axisPointer: { type: "line", lineStyle: { color: t.soft } }, formatter: (points) => momentTip(run, nearest(run, points[0].axisValue)) },
    series,
  }, { notMerge: true });
  const node = document.getElementById("memory-chart"), answer = document.getElementById("limit-answer");
  node.setAttribute("aria-valuemin", 0); node.setAttribute("aria-valuemax", run.moments.length - 1); node.setAttribute("aria-valuenow", state.moment);
  node.setAttribute("aria-valuetext", momentText(run, state.moment));
  const over = limit && run.peak.reserved - limit.bytes;
  answer.textContent = !limit ? "" : over <= 0 ? `${size(-over)} to spare` : releases(run) && limit.bytes >= run.limit ? "fits by releasing cached memory" : `${size(over)} too much`;
}

// The other run's total, on this run's axis.
function stretched(other, run) {
  const points = other.whole ? other.moments.map(([event], i) => [event, other.totals[i]]) : other.line;
  const last = (points[points.length - 1] || [1])[0] || 1, end = Math.max(run.events - 1, (run.line[run.line.length - 1] || [1])[0]);
  return points.map(([event, bytes]) => [event * end / last, bytes]);
}

// In the unit of the highest value, so that all labels have the same.
function niceInterval(top) {
  const base = 1024 ** Math.min(3, Math.floor(Math.log2(top || 1) / 10));
  return base * [0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200].find((each) => each * base * 6 >= top || each === 200);
}

function nearest(run, event) {
  let low = 0, high = run.moments.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; run.moments[middle][0] < event ? low = middle : high = middle; }
  return high >= 0 && Math.abs(run.moments[high][0] - event) < Math.abs(run.moments[low][0] - event) ? high : low;
}

const momentText = (run, m) => `${size(run.totals[m] || 0)} allocated, ${phaseAt(run, (run.moments[m] || [0])[0])}`;

function momentTip(run, m) {
  const rows = (run.byStage[m] || []).map((bytes, stage) => [bytes, stage]).filter(([bytes]) => bytes > 0).reverse();
  return el("div", { class: "tip" }, el("b", {}, momentText(run, m)),
    rows.map(([bytes, stage]) => el("div", {}, dot(stage), el("span", {}, data.stages[stage]), el("span", { class: "num" }, size(bytes)))),
    run.moments[m] && run.moments[m][2] ? el("span", { class: "soft" }, run.moments[m][2]) : null);
}

// ---------------------------------------------------------------------------------------- what is alive

function aliveSection() {
  if (!data.runs.length) return null;
  const search = el("input", {
    type: "search", id: "search", placeholder: "Filter: module, line, op, shape…", "aria-label": "filter tensors",
    oninput: (event) => { state.query = event.target.value; drawAlive(); },
  });
  return el("section", { id: "alive" },
    el("header", {}, el("h2", {}, "Alive at this moment"),
      tabs("view", [["tensors", "Tensors"], ["modules", "Modules"], ["lines", "Source lines"]], state.view, (value) => { state.view = value; state.all = false; drawAlive(); }), search),
    el("p", { class: "moment", id: "moment", "aria-live": "polite" }),
    el("div", { class: "chart map", id: "map" }), el("div", { class: "table", id: "table" }));
}

const COLUMNS = {
  tensors: [["bytes", "Size"], ["", ""], ["count", "Count"], ["shape", "Tensor"], ["ops", "Made by"], ["stage", "Stage"], ["site", "Source line and module"]],
  modules: [["bytes", "Size"], ["", ""], ["count", "Tensors"], ["key", "Module"]],
  lines: [["bytes", "Size"], ["", ""], ["count", "Tensors"], ["key", "Source line"]],
};
const SORTED_BY = {
  bytes: (one) => one.bytes, count: (one) => one.count, key: (one) => String(one.key), shape: (one) => one.row[0],
  ops: (one) => [...one.ops].join(), stage: (one) => one.row[4], site: (one) => (one.site || [""])[0],
};

function drawAlive() {
  const run = current(), found = entries(run, state.moment, state.view), total = run.totals[state.moment] || 0;
  const listed = found.reduce((sum, one) => sum + one.bytes, 0), moment = run.moments[state.moment] || [0, 0, ""];
  document.getElementById("moment").replaceChildren(
    el("b", { class: "num" }, size(total)), el("span", {}, phaseAt(run, moment[0])),
    el("span", { class: "soft wrap" }, moment[2] ? `during ${moment[2]}` : ""),
    el("span", { class: "faint" }, state.moment !== run.peakMoment ? "" : run.failed ? "here memory ran out" : "this is the peak"),
    listed < total - 1 ? el("span", { class: "soft" }, `${size(listed)} of it match`) : "");
  const sign = state.descending ? -1 : 1, by = SORTED_BY[state.sort] || SORTED_BY.bytes;
  found.sort((a, b) => { const x = by(a), y = by(b); return (x < y ? -1 : x > y ? 1 : b.bytes - a.bytes) * sign; });
  const shown = state.all ? found : found.slice(0, 25), most = Math.max(...found.map((one) => one.bytes), 1);
  const head = el("tr", {}, COLUMNS[state.view].map(([key, label]) => key
    ? el("th", { "aria-sort": state.sort === key ? (state.descending ? "descending" : "ascending") : "none" }, el("button", { "data-sort": key, onclick: () => {
      state.descending = state.sort === key ? !state.descending : key === "bytes" || key === "count"; state.sort = key; drawAlive();
      document.querySelector(`[data-sort="${key}"]`).focus();
    } }, label)) : el("th", { "aria-hidden": true })));
  document.getElementById("table").replaceChildren(
    el("table", {}, el("thead", {}, head), el("tbody", {}, shown.map((one) => aliveRow(run, one, most, total)))),
    found.length > shown.length ? el("button", { class: "more", onclick: () => { state.all = true; drawAlive(); } }, `Show all ${found.length.toLocaleString("en")}`) : "",
    found.length ? "" : el("p", { class: "soft" }, "Nothing matches."));
  const map = document.getElementById("map");
  map.style.display = state.view === "tensors" || !found.length ? "none" : "";
  if (map.style.display !== "none") drawMap(run);
}

function aliveRow(run, one, most, total) {
  const cells = [
    el("td", { class: "num" }, el("b", {}, size(one.bytes)), el("small", {}, share(one.bytes, total))),
    el("td", { class: "share" }, el("div", { class: "meter" }, el("i", { style: { width: Math.max(1, 100 * one.bytes / most) + "%", background: `var(--s${mainStage(one)})` } }))),
    el("td", { class: "num" }, one.count.toLocaleString("en")),
  ];
  if (state.view === "tensors") cells.push(
    el("td", { class: "mono num" }, one.row[0] || "–", el("small", {}, one.row[1])), el("td", { class: "mono ops", title: [...one.ops].join(", ") }, [...one.ops].join(", ")),
    el("td", {}, el("span", { style: { whiteSpace: "nowrap" } }, dot(one.row[4]), " ", data.stages[one.row[4]])),
    el("td", { class: "wrap" }, one.site ? siteCell(one.site) : "", one.row[2] ? el("small", {}, "in " + modulesAlive(run, one)) : ""));
  else if (state.view === "modules") cells.push(el("td", { class: "mono wrap" }, one.key || "(outside modules)"));
  else cells.push(el("td", { class: "wrap" }, one.site ? siteCell(one.site) : "(no source line)"));
  return el("tr", {}, cells);
}

const siteCell = (site) => [el("span", { class: "mono" }, site[0]), " ", el("span", { class: "faint" }, site[1]), ...site[2].split("\n").map((line) => el("small", { class: "mono code", title: line }, line))];

// A tree of the tensors alive, by module path or by file and line, with the stages' colours.
function drawMap(run) {
  const root = { name: "all", children: new Map(), value: 0 };
  for (const { row, op, module, site, bytes } of visible(run, state.moment)) {
    const cut = site ? site[0].lastIndexOf(":") : -1;
    const path = state.view === "modules" ? (module ? module.split(".") : ["(outside modules)"])
      : site ? [site[0].slice(0, cut), `line ${site[0].slice(cut + 1)} ${site[1]}`] : ["(no source line)"];
    let node = root;
    for (const part of [...path, `${op} ${row[0]}`]) {
      if (!node.children.has(part)) node.children.set(part, { name: part, children: new Map(), value: 0, stages: new Array(data.stages.length).fill(0) });
      node = node.children.get(part); node.value += bytes; node.stages[row[4]] += bytes;
    }
  }
  const t = theme();
  const plain = (node) => {
    let name = node.name;
    while (node.children.size === 1) {  // a chain of single children is one box
      const [only] = node.children.values();
      if (!only.children.size) break;
      node = only; name += (state.view === "modules" ? "." : " ") + only.name;
    }
    const children = [...node.children.values()].map(plain);
    return { name, value: node.value, children: children.length ? children : undefined, itemStyle: { color: stageColour(node.stages.indexOf(Math.max(...node.stages))) } };
  };
  const map = chart("map");
  map.resize();
  map.setOption({
    animation: false,
    tooltip: {
      ...tooltip(t),
      formatter: (point) => el("div", { class: "tip" }, el("b", {}, point.treePathInfo.slice(1).map((each) => each.name).join(" › ")),
        el("div", {}, `${size(point.value)}, ${share(point.value, run.totals[state.moment])}`)),
    },
    series: [{
      type: "treemap", name: "all", roam: false, nodeClick: "zoomToNode", animation: false, leafDepth: 3, drillDownIcon: "",
      left: 0, right: 0, top: 0, bottom: 30, visibleMin: 60, sort: "desc",
      breadcrumb: { bottom: 0, itemStyle: { color: colour("--hover"), borderColor: t.rule, textStyle: { color: t.ink } }, emphasis: { itemStyle: { color: t.rule } } },
      label: {
        show: true, formatter: (point) => `${point.name}\n${size(point.value)}`, fontSize: 11, lineHeight: 15, overflow: "truncate",
        color: "#fff", textBorderColor: "rgb(0 0 0 / .35)", textBorderWidth: 2,
      },
      upperLabel: { show: true, height: 19, color: t.ink, fontSize: 11, formatter: (point) => `${point.name}   ${size(point.value)}`, overflow: "truncate" },
      itemStyle: { borderColor: t.card, borderWidth: 1, gapWidth: 1 },
      levels: [
        { itemStyle: { gapWidth: 3, borderWidth: 0, borderColor: t.card }, upperLabel: { show: false } },
        ...Array(6).fill({ itemStyle: { gapWidth: 1, borderWidth: 2, borderColor: colour("--hover") } }),
      ],
      data: [...root.children.values()].map(plain),
    }],
  }, { notMerge: true });
}

// ---------------------------------------------------------------------------------------- other sections

function findingsSection() {
  if (!data.findings.length) return null;
  const peak = data.runs[0].peak, total = peak.allocated;
  const part = (one) => one.pattern === "fragmentation" ? `${share(one.bytes, peak.reserved)} of what is reserved` : `${share(one.bytes, total)} of what is allocated at the peak`;
  const card = (one) => el("div", { class: "finding" },
    el("h3", {}, el("b", {}, one.pattern.slice(0, 1).toUpperCase() + one.pattern.slice(1)), el("span", { class: "num" }, `${size(one.bytes)}, ${part(one)}`)),
    el("p", { class: "wrap" }, one.advice.replace(/\.?$/, ".")),
    el("p", { class: "facts mono wrap" }, [one.formula, one.growth].filter(Boolean).join("  ·  ")),
    one.lines.slice(0, 1).map(excerpt),
    one.lines.length > 1 ? el("p", { class: "soft wrap" }, "also ", one.lines.slice(1).map((line) => line.label).join(", ")) : null,
    one.fixes.length ? el("p", {}, "Fixes: ", one.fixes.map((name) => el("span", { class: "tag mono" }, name))) : null);
  const large = data.findings.filter((one, i) => i < 1 || (i < 4 && one.bytes > 0.1 * total)), rest = data.findings.filter((one) => !large.includes(one));
  return el("section", { id: "findings" }, el("header", {}, el("h2", {}, "What causes the peak")), large.map(card),
    rest.length ? el("details", {}, el("summary", {}, `${rest.length} smaller ones`), rest.map(card)) : null);
}

const excerpt = (at) => el("div", { class: "excerpt" }, el("div", {}, el("b", { class: "mono wrap" }, at.label), el("span", { class: "soft wrap" }, at.function)),
  at.code.some(Boolean) ? el("pre", {}, at.code.map((line, i) => el("span", { class: at.first + i === at.line ? "hit" : "", "data-n": at.first + i }, line || " "))) : null);

function planSection() {
  const plan = data.plan;
  if (!plan) return null;
  const usesHost = plan.sets.some((one) => one.host);
  const labels = ["Needs", "Step time", ...(usesHost ? ["Pinned on the host"] : []), "", "Fixes"];
  const rows = plan.sets.map((one, i) => el("tr", { "data-set": i },
    el("td", { class: "num" }, el("b", {}, (one.estimated ? "~" : "") + size(one.bytes))), el("td", { class: "num" }, `${one.estimated ? "~" : ""}× ${one.slowdown.toFixed(2)}`),
    usesHost ? el("td", { class: "num" }, one.host ? size(one.host) : "") : null,
    el("td", {}, el("span", { class: "tag " + (one.fits ? "good" : "bad") }, one.fits ? "fits" : one.tooClose ? "too close to call" : "does not fit")),
    el("td", { class: "mono wrap" }, one.role ? el("b", {}, one.role) : "", one.fixes.map((name) => el("div", {}, name)))));
  return el("section", { id: "plan" }, el("header", {}, el("h2", { class: "wrap" }, "Plans: memory against time")), el("p", { class: "wrap" }, plan.verdict),
    plan.host ? el("p", { class: "wrap" }, `The plan pins ${size(plan.host)} of host memory in total.`) : null,
    plan.commands.length ? el("p", { class: "wrap" }, `${plan.apply}:`) : null,
    plan.commands.length ? el("pre", { class: "commands" }, plan.commands.join("\n")) : null,
    plan.remarks.map((text) => el("p", { class: "soft wrap" }, text)),
    el("div", { class: "columns" }, el("div", { class: "chart", id: "plan-chart" }),
      el("div", { class: "table" }, el("table", {}, el("thead", {}, el("tr", {}, labels.map((label) => el("th", {}, label)))), el("tbody", {}, rows)))));
}

const planTip = (one) => el("div", { class: "tip" }, el("b", {}, one.role || "alternative"),
  el("div", {}, `${size(one.bytes)}, × ${one.slowdown.toFixed(2)}`), el("span", { class: "soft" }, one.fixes.join(" + ") || "no fixes"));

function drawPlan() {
  if (!data.plan) return;
  const plan = data.plan, t = theme(), points = plan.sets.map((one) => [one.slowdown, one.bytes]);
  const front = plan.sets.filter((one) => one.role !== "as it is").map((one) => [one.slowdown, one.bytes]).sort((a, b) => a[0] - b[0]);
  const top = Math.max(plan.limit, ...points.map(([, y]) => y));
  const least = Math.min(...points.map(([x]) => x)), most = Math.max(...points.map(([x]) => x)), room = 0.12 * (most - least) || 0.1;
  chart("plan-chart").setOption({
    animation: false, grid: { left: 66, right: 24, top: 20, bottom: 40 },
    xAxis: {
      type: "value", min: least - room, max: most + room, axisLabel: { color: t.soft, formatter: (v) => "× " + Number(v.toFixed(3)), showMinLabel: false, showMaxLabel: false }, splitLine: { lineStyle: { color: t.rule } },
      name: "step time, relative", nameLocation: "middle", nameGap: 26, nameTextStyle: { color: t.faint },
    },
    yAxis: memoryAxis(t, top),
    tooltip: { trigger: "item", ...tooltip(t), formatter: (point) => planTip(plan.sets[point.dataIndex]) },
    series: [
      { type: "line", data: front, symbol: "none", silent: true, lineStyle: { color: t.faint, type: "dotted" }, tooltip: { show: false } },
      { type: "scatter", symbolSize: (_, point) => plan.sets[point.dataIndex].role ? 16 : 10,
        data: plan.sets.map((one) => ({
          value: [one.slowdown, one.bytes],
          itemStyle: { color: !one.fits ? t.bad : one.role === "the plan" ? colour("--good") : t.accent, borderColor: t.card, borderWidth: 2 },
          label: { show: Boolean(one.role), formatter: one.role, position: "top", color: t.ink, fontWeight: 600 },
        })),
        markLine: {
          silent: true, symbol: "none", data: [{ yAxis: plan.limit }], lineStyle: { color: t.bad, type: "dashed" },
          label: { formatter: `${plan.gpu}: ${size(plan.limit)}`, position: "insideMiddleTop", color: t.bad, fontWeight: 600 },
        } },
    ],
  }, { notMerge: true });
}

function changesSection() {
  if (data.runs.length < 2) return null;
  const [before, after] = [data.runs[0], data.runs[data.runs.length - 1]];
  const row = (label, a, b) => el("tr", {}, el("td", { class: "num " + (b > a ? "up" : "down") }, el("b", {}, signed(b - a))),
    el("td", { class: "num" }, size(a)), el("td", { class: "num" }, size(b)), el("td", { class: "wrap" }, label));
  return el("section", { id: "changes" }, el("header", {}, el("h2", {}, "What changed at the peak")),
    el("div", { class: "table" }, el("table", {}, el("thead", {}, el("tr", {}, ["Change", before.title, after.title, "Source line"].map((label) => el("th", {}, label)))),
      el("tbody", {}, row(el("b", {}, "needed in total"), before.peak.device, after.peak.device), data.changes.map(([site, a, b]) => row(siteCell(site), a, b))))));
}

function measuredSection() {
  if (!data.measured.length) return null;
  const shown = (name, value) => value === null ? "–" : name === "step time" ? seconds(value) : size(value);
  return el("section", { id: "measured" }, el("header", {}, el("h2", {}, "Predicted and measured"), el("span", { class: "soft" }, data.measured[0].gpu)),
    data.measured.map((one) => el("div", { class: "table" }, el("table", {},
      el("thead", {}, el("tr", {}, [one.title, "Predicted", "Measured", "Difference"].map((label) => el("th", {}, label)))),
      el("tbody", {}, one.rows.map(([name, predicted, measured]) => el("tr", {}, el("td", {}, name),
        el("td", { class: "num" }, shown(name, predicted)), el("td", { class: "num" }, shown(name, measured)),
        el("td", { class: "num" }, predicted && measured ? `${(100 * (measured / predicted - 1)).toFixed(2)} %` : "–"))),
      one.differences.map(([op, aspect, times, bytes]) => el("tr", {}, el("td", { class: "mono wrap" }, `${op}, ${aspect}, ${times} times`),
        el("td"), el("td"), el("td", { class: "num" }, signed(bytes)))))),
    one.failure ? el("p", { class: "oom wrap" }, one.failure) : null)));
}

function notesSection() {
  const notes = [...data.notes, ...data.runs.flatMap((run) => run.notes)];
  if (!notes.length) return null;
  return el("section", { id: "notes" }, el("header", {}, el("h2", {}, "Notes")),
    el("ul", {}, notes.map(([text, at]) => el("li", { class: "wrap" }, text, " ", el("span", { class: "soft mono" }, at)))));
}

// ---------------------------------------------------------------------------------------------- the page

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.getElementById("theme").textContent = dark ? "Light" : "Dark";
  draw();
}

function draw() {
  if (data.runs.length) { drawMemory(); drawAlive(); }
  drawPlan();
}

const sections = [
  ["verdict", "Verdict", verdictSection],
  ["findings", "Causes", findingsSection],
  ["plan", "Plans", planSection],
  ["measured", "Measured", measuredSection],
  ["changes", "Changes", changesSection],
  ["memory", "Memory", memorySection],
  ["alive", "Tensors", aliveSection],
  ["notes", "Notes", notesSection],
].map(([id, label, make]) => [id, label, make()]).filter(([, , node]) => node);
document.title = `${data.target} · oomph`;
document.getElementById("page").append(
  el("div", { class: "top" }, el("span", { class: "brand" }, "oomph"), el("span", { class: "target mono", title: data.target }, data.target),
    el("nav", { "aria-label": "sections" }, sections.map(([id, label]) => el("a", { href: "#" + id }, label))),
    el("button", { id: "theme", onclick: () => setTheme(document.documentElement.dataset.theme !== "dark") })),
  ...sections.map(([, , node]) => node),
  el("footer", {},
    el("span", {}, el("kbd", {}, "/"), " filter"),
    el("span", {}, el("kbd", {}, "←"), " ", el("kbd", {}, "→"), " move in time, in the chart"),
    el("span", {}, el("kbd", {}, "P"), " peak"),
    el("span", {}, "Charts: Apache ECharts, Apache-2.0")));
const dark = window.matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => setTheme(dark.matches));
setTheme(dark.matches);
if (data.runs.length) charts["memory-chart"].getZr().on("click", ({ offsetX, offsetY }) => {
  const area = charts["memory-chart"];
  if (current().whole && area.containPixel("grid", [offsetX, offsetY])) select(nearest(current(), area.convertFromPixel({ xAxisIndex: 0 }, offsetX)));
});
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey || !data.runs.length) return;
  if (event.key === "/") { event.preventDefault(); document.getElementById("search").focus(); }
  if (event.key === "p" || event.key === "P") select(current().peakMoment);
});
window.addEventListener("resize", () => Object.values(charts).forEach((each) => each.resize()));
document.documentElement.dataset.ready = "true";
})();
