# ruff: noqa: E501
"""What a predicted program sends, starts, signals and changes of other processes: nothing.

    python -m benchmarks.routes_processes

Each route runs in a prediction: with all protections, and with those that a kernel or a container can lack
imitated absent. It is harm if a packet leaves, a program starts, a signal or a limit reaches a process that is
not the program's, or a process is left. Harm is permitted only where a warning came first. Programs of the kind
"works" do the same within their own processes, and have to succeed. Fails otherwise.

Runs in namespaces of its own, as root or with user namespaces: all of its processes are seen, and packets are
counted on the one interface, which leads nowhere. Written to results/routes_processes.csv.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import oomph
from benchmarks import ROOT, rows
from oomph.prediction.sandbox import IMITATE

RESULTS = ROOT / "benchmarks" / "results" / "routes_processes.csv"
ABSENT = ("", "landlock", "seccomp", "landlock seccomp")
_INSIDE = "OOMPH_ROUTES_NAMESPACE"
_STARTED = 200  # a descriptor: programs that are started write to it
_NETWORK = """
ip link set lo up
ip link add out type veth peer name peer
ip address add 10.254.0.1/24 dev out
ip -6 address add fd77::1/64 dev out nodad
ip link set out up
ip link set peer up
ip route add default via 10.254.0.2
ip neighbour add 10.254.0.2 lladdr 02:00:00:00:00:02 dev out
ip neighbour add fd77::2 lladdr 02:00:00:00:00:02 dev out
"""
HEADER = """
import _posixsubprocess, ctypes, fcntl, multiprocessing, os, resource, signal, socket, struct, subprocess, sys, threading, time
import torch
libc = ctypes.CDLL(None, use_errno=True)
far, far6 = ("10.254.0.2", 9), ("fd77::2", 9)
def address(host, port, family=socket.AF_INET):
    return struct.pack("=H", family) + struct.pack(">H", port) + socket.inet_aton(host) + bytes(8)
def c(name, *arguments):
    ctypes.set_errno(0)
    answer = getattr(libc, name)(*arguments)
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer
made = []
def udp(family=socket.AF_INET):
    made.append(socket.socket(family, socket.SOCK_DGRAM))
    return made[-1]
def tcp(timeout=0.3):
    made.append(socket.socket())
    made[-1].settimeout(timeout)
    return made[-1]
class Message(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("size", ctypes.c_uint32), ("parts", ctypes.c_void_p),
                ("count", ctypes.c_size_t), ("control", ctypes.c_void_p), ("length", ctypes.c_size_t), ("flags", ctypes.c_int)]
def message():
    global kept
    text = ctypes.create_string_buffer(b"x")
    part = (ctypes.c_void_p * 2)(ctypes.addressof(text), 1)
    kept = text, part
    return Message(address(*far), 16, ctypes.addressof(part), 1, None, 0, 0)
def child(function):
    pid = os.fork()
    if not pid:
        try:
            function()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
def detached(function):
    def leave():
        os.setsid()
        if not os.fork():
            function()
    child(leave)
"""
SENDS = {
    "UDP sendto": "udp().sendto(b'x', far)",
    "UDP sendto, C": "c('sendto', udp().fileno(), b'x', 1, 0, address(*far), 16)",
    "UDP sendto with flags, C": "c('sendto', udp().fileno(), b'x', 1, 0x40, address(*far), 16)",
    "UDP sendmsg": "udp().sendmsg([b'x'], [], 0, far)",
    "UDP sendmsg, C": "c('sendmsg', udp().fileno(), ctypes.byref(message()), 0)",
    "UDP sendmmsg, C": "c('sendmmsg', udp().fileno(), ctypes.byref((Message * 2)(message())), 1, 0)",
    "UDP connect, send": "s = udp(); s.connect(far); s.send(b'x')",
    "UDP connect, C": "s = udp(); c('connect', s.fileno(), address(*far), 16); s.send(b'x')",
    "UDP sendto, IPv6": "udp(socket.AF_INET6).sendto(b'x', far6)",
    "UDP broadcast": "s = udp(); s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1); s.sendto(b'x', ('10.254.0.255', 9))",
    "UDP multicast": "udp().sendto(b'x', ('224.0.0.1', 9))",
    "TCP connect": "tcp().connect(far)",
    "TCP connect_ex": "tcp().connect_ex(far)",
    "TCP connect, C": "s = tcp(); c('connect', s.fileno(), address(*far), 16)",
    "TCP connect, IPv6": "socket.create_connection(far6, 0.3)",
    "TCP fast open, C": "c('sendto', tcp().fileno(), b'x', 1, 0x20000000, address(*far), 16)",
    "TCP connect in a thread": "t = threading.Thread(target=lambda: tcp().connect_ex(far)); t.start(); t.join()",
    "TCP connect in a fork": "child(lambda: c('connect', tcp().fileno(), address(*far), 16))",
    "TCP connection of the caller": "c('send', CONNECTION, b'x', 1, 0x4000)",
    "DNS": "socket.getaddrinfo('example.com', 80)",
    "DNS, C": "c('gethostbyname', b'example.com')",
    "DNS of a resolver on this machine": "c('sendto', udp().fileno(), b'x', 1, 0, address('127.0.0.1', 53), 16)",
    "urllib": "import urllib.request; urllib.request.urlopen('http://10.254.0.2/', timeout=0.3)",
    "ICMP, raw": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).sendto(bytes([8, 0, 247, 255, 0, 0, 0, 0]), ('10.254.0.2', 0))",
    "Ethernet frame": "s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); s.bind(('out', 0)); s.send(bytes(12) + b'\\x08\\0' + bytes(50))",
    "TCPStore of torch": "torch.distributed.TCPStore('10.254.0.2', 9, timeout=__import__('datetime').timedelta(seconds=1))",
}
STARTS = {
    "subprocess.run": "subprocess.run([HELPER], pass_fds=[200])",
    "shell=True": "subprocess.run(HELPER, shell=True, pass_fds=[200])",
    "os.system": "os.system(HELPER)",
    "os.popen": "os.popen(HELPER).read()",
    "os.execv": "child(lambda: os.execv(HELPER, [HELPER]))",
    "os.posix_spawn": "os.posix_spawn(HELPER, [HELPER], {})",
    "os.spawnv": "os.spawnv(os.P_WAIT, HELPER, [HELPER])",
    "system, C": "c('system', HELPER.encode())",
    "popen, C": "c('popen', HELPER.encode(), b'r')",
    "execv, C": "child(lambda: c('execv', HELPER.encode(), (ctypes.c_char_p * 2)(HELPER.encode())))",
    "execveat, C": "child(lambda: c('syscall', {'x86_64': 322}.get(os.uname().machine, 281), -100, HELPER.encode(), (ctypes.c_char_p * 2)(HELPER.encode()), None, 0))",
    "posix_spawn, C": "c('posix_spawn', ctypes.byref(ctypes.c_int()), HELPER.encode(), None, None, (ctypes.c_char_p * 2)(HELPER.encode()), None)",
    "_posixsubprocess.fork_exec": "_posixsubprocess.fork_exec([HELPER], [HELPER.encode()], False, (200,), None, None, -1, -1, -1, -1, -1, -1, *os.pipe(), True, False, -1, None, None, None, -1, None, True)",
    "as an argument of git": "child(lambda: c('execvp', b'git', (ctypes.c_char_p * 5)(b'git', b'-c', b'alias.x=!' + HELPER.encode(), b'x')))",
    "git diff --ext-diff": "os.environ['GIT_EXTERNAL_DIFF'] = HELPER; os.chdir(REPOSITORY); subprocess.run(['git', 'diff', '--ext-diff'], close_fds=False)",
    "git diff of a program in the repository": "os.chdir(REPOSITORY); subprocess.run(['git', 'diff'], close_fds=False)",
    "git status with a monitor in the repository": "os.chdir(REPOSITORY); subprocess.run(['git', 'status'], close_fds=False)",
    "multiprocessing spawn": "p = multiprocessing.get_context('spawn').Process(target=os.system, args=(HELPER,)); p.start(); p.join()",
    "multiprocessing forkserver": "p = multiprocessing.get_context('forkserver').Process(target=print); p.start(); p.join()",
    "a shell in a fork": "child(lambda: os.execvp('sh', ['sh', '-c', HELPER]))",
}
SIGNALS = {
    "os.kill": "os.kill(VICTIM, signal.SIGUSR1)",
    "os.kill, SIGTERM": "os.kill(VICTIM, signal.SIGTERM)",
    "os.killpg": "os.killpg(os.getpgid(VICTIM), signal.SIGUSR1)",
    "os.kill of its group": "os.kill(-os.getpgid(VICTIM), signal.SIGUSR1)",
    "kill, C": "c('kill', VICTIM, signal.SIGUSR1)",
    "kill of all, C": "c('kill', -1, signal.SIGUSR1)",
    "killpg, C": "c('killpg', os.getpgid(VICTIM), signal.SIGUSR1)",
    "tgkill, C": "c('tgkill', VICTIM, VICTIM, signal.SIGUSR1)",
    "sigqueue, C": "c('sigqueue', VICTIM, signal.SIGUSR1, 0)",
    "pidfd_send_signal": "signal.pidfd_send_signal(os.pidfd_open(VICTIM), signal.SIGUSR1)",
    "in a fork": "child(lambda: c('kill', VICTIM, signal.SIGUSR1))",
    "in a thread": "t = threading.Thread(target=lambda: libc.kill(VICTIM, signal.SIGUSR1)); t.start(); t.join()",
    "of the caller": "c('kill', CALLER, signal.SIGUSR1)",
    "of the caller's group": "os.killpg(os.getpgid(CALLER), signal.SIGUSR1)",
    "a file's owner": "r, w = socket.socketpair(); fcntl.fcntl(r, fcntl.F_SETOWN, VICTIM); fcntl.fcntl(r, 10, signal.SIGUSR1); fcntl.fcntl(r, fcntl.F_SETFL, fcntl.fcntl(r, fcntl.F_GETFL) | 0x2000); w.send(b'x')",
}
CHANGES = {
    "setpriority": "os.setpriority(os.PRIO_PROCESS, VICTIM, 7)",
    "setpriority of its group": "os.setpriority(os.PRIO_PGRP, os.getpgid(VICTIM), 7)",
    "setpriority of the user": "os.setpriority(os.PRIO_USER, os.getuid(), 7)",
    "setpriority, C": "c('setpriority', 0, VICTIM, 7)",
    "of the caller": "os.setpriority(os.PRIO_PROCESS, CALLER, 7)",
    "prlimit": "resource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (50, 50))",
    "prlimit, C": "c('prlimit', VICTIM, 7, (ctypes.c_uint64 * 2)(50, 50), None)",
    "sched_setaffinity": "os.sched_setaffinity(VICTIM, {0})",
    "sched_setscheduler": "os.sched_setscheduler(VICTIM, os.SCHED_BATCH, os.sched_param(0))",
    "ioprio_set": "c('syscall', {'x86_64': 251}.get(os.uname().machine, 30), 1, VICTIM, 3 << 13)",
    "oom_score_adj": "open(f'/proc/{VICTIM}/oom_score_adj', 'w').write('500')",
    "ptrace": "c('ptrace', 16, VICTIM, 0, 0)",
    "memory of another process": "c('process_vm_writev', VICTIM, (ctypes.c_uint64 * 2)(), 1, (ctypes.c_uint64 * 2)(), 1, 0)",
    "host name": "socket.sethostname('changed')",
}
LEAVES = {
    "a fork": "os.fork() or time.sleep(60)",
    "setsid": "child(lambda: (os.setsid(), os.fork() or time.sleep(60)))",
    "two forks and setsid": "detached(lambda: time.sleep(60))",
    "which ignores signals": "detached(lambda: (signal.signal(signal.SIGTERM, signal.SIG_IGN), signal.signal(signal.SIGHUP, signal.SIG_IGN), time.sleep(60)))",
    "a daemon, C": "child(lambda: (libc.daemon(1, 1), time.sleep(60)))",
    "and the program crashes": "detached(lambda: time.sleep(60)); os._exit(3)",
    "that forks again and again": "detached(lambda: [os.fork() and os._exit(0) or time.sleep(0.001) for _ in range(3000)])",
}
WORKS = {
    "DataLoader workers": "assert len(list(torch.utils.data.DataLoader(range(8), 2, num_workers=2))) == 4",
    "multiprocessing fork, queue": "c_ = multiprocessing.get_context('fork'); q = c_.Queue(); p = c_.Process(target=q.put, args=(1,)); p.start(); assert q.get(timeout=20) == 1; p.join()",
    "multiprocessing pool": "with multiprocessing.get_context('fork').Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]",
    "multiprocessing manager": "with multiprocessing.get_context('fork').Manager() as m: d = m.dict(); d['a'] = 1; assert d['a'] == 1",
    "Unix socket server": "s = socket.socket(socket.AF_UNIX); s.bind('server'); s.listen(); assert os.path.exists('server'); k = socket.socket(socket.AF_UNIX); k.connect('server'); k.send(b'x'); assert s.accept()[0].recv(1) == b'x'",
    "Unix socket with a long path": "d = 'd' * 120; os.mkdir(d); s = socket.socket(socket.AF_UNIX); s.bind(os.path.abspath(d + '/s')); s.listen(); k = socket.socket(socket.AF_UNIX); k.connect(os.path.abspath(d + '/s'))",
    "abstract socket": "s = socket.socket(socket.AF_UNIX); s.bind('\\0of the program'); s.listen(); k = socket.socket(socket.AF_UNIX); k.connect('\\0of the program')",
    "socket pair": "a, b = socket.socketpair(); a.send(b'x'); assert b.recv(1) == b'x'",
    "TCP server": "s = socket.create_server(('127.0.0.1', 0)); k = socket.create_connection(s.getsockname()); k.send(b'x'); assert s.accept()[0].recv(1) == b'x'",
    "TCP server on the machine's address": "s = socket.create_server(('', 0)); k = socket.socket(); c('connect', k.fileno(), address('10.254.0.1', s.getsockname()[1]), 16)",
    "UDP on the loopback": "s = udp(); s.bind(('127.0.0.1', 0)); udp().sendto(b'x', s.getsockname()); assert s.recv(1) == b'x'",
    "name of the machine": "socket.getaddrinfo('localhost', 80)",
    "asyncio server": "import asyncio\nasync def main():\n    server = await asyncio.start_unix_server(lambda r, w: w.close(), 'asyncio'); await asyncio.open_unix_connection('asyncio')\nasyncio.run(main())",
    "TCPStore": "s = torch.distributed.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); s.set('a', 'b'); assert s.get('a') == b'b'",
    "gloo": "s = torch.distributed.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); torch.distributed.ProcessGroupGloo(s, 0, 1)",
    "signals of its own": "h = []; signal.signal(signal.SIGUSR1, lambda *a: h.append(1)); os.kill(os.getpid(), signal.SIGUSR1); signal.raise_signal(signal.SIGUSR1); assert len(h) == 2",
    "signals of its children": "p = os.fork() or time.sleep(60); os.kill(p, signal.SIGKILL); assert os.waitpid(p, 0)[1] == 9",
    "its group": "signal.signal(signal.SIGUSR1, signal.SIG_IGN); os.killpg(os.getpgrp(), signal.SIGUSR1)",
    "alarm": "h = []; signal.signal(signal.SIGALRM, lambda *a: h.append(1)); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.1); assert h",
    "nice": "os.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0)); resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))",
    "affinity of a thread": "t = threading.Thread(target=lambda: os.sched_setaffinity(threading.get_native_id(), os.sched_getaffinity(0))); t.start(); t.join()",
    "faulthandler": "import faulthandler; faulthandler.enable(); faulthandler.dump_traceback_later(60); faulthandler.cancel_dump_traceback_later()",
    "git": "assert subprocess.run(['git', '-C', REPOSITORY, 'rev-parse', 'HEAD'], capture_output=True).returncode == 0",
    "git describe": "assert subprocess.run('git describe --always --broken', shell=True, cwd=REPOSITORY, capture_output=True).returncode == 0",
    "nvidia-smi, uname, a program that is not there": "subprocess.check_output(['nvidia-smi']); subprocess.check_output(['uname', '-a'])\ntry: subprocess.run(['no-such-program'])\nexcept FileNotFoundError: pass",
    "torch.compile": "torch.compile(torch.nn.Linear(8, 8, device='cuda'))(torch.ones(2, 8, device='cuda')).sum().backward()",
    "TensorBoard": "from torch.utils.tensorboard import SummaryWriter\nw = SummaryWriter('runs'); w.add_scalar('a', 1, 1); w.close()",
    "shared tensors": "q = torch.multiprocessing.get_context('fork').Queue(); p = torch.multiprocessing.get_context('fork').Process(target=lambda: (q.put(torch.ones(4)), q.get())); p.start(); assert q.get(timeout=60).sum() == 4; q.put(0); p.join()",
}
KINDS = {
    "sends": SENDS,
    "starts": STARTS,
    "signals": SIGNALS,
    "changes": CHANGES,
    "leaves": LEAVES,
    "works": WORKS,
}


@dataclass
class Row:
    kind: str
    route: str
    missing: str
    harm: str
    warned: bool
    answer: str

    @property
    def failed(self) -> bool:
        return (bool(self.harm) and not self.warned) or (self.kind == "works" and self.answer != "ok")


class Victim:
    """A process of the user, which tells what reaches it."""

    def __init__(self) -> None:
        read, write = os.pipe()
        self.pid, self.received = os.fork(), read
        os.set_blocking(read, False)
        if self.pid == 0:
            os.setsid()
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
                signal.signal(number, lambda arrived, frame: os.write(write, b"%d " % arrived))
            while True:
                time.sleep(60)
        time.sleep(0.2)
        self.before = self.state()

    def state(self) -> tuple[Any, ...]:
        pid = self.pid
        return (
            os.getpriority(os.PRIO_PROCESS, pid),
            resource.prlimit(pid, resource.RLIMIT_NOFILE),
            os.sched_getaffinity(pid),
            os.sched_getscheduler(pid),
            _io_priority(pid),
            Path(f"/proc/{pid}/oom_score_adj").read_text(),
            _line(pid, "TracerPid"),
        )

    def harm(self) -> Iterator[str]:
        with contextlib.suppress(BlockingIOError):
            yield f"signal {os.read(self.received, 100).decode().strip()}"
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT):
            yield "ended or stopped"
        elif self.state() != self.before:
            yield "changed"

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _line(pid: int, name: str) -> str:
    return next(each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if name in each)


def _io_priority(pid: int) -> int:
    number = {"x86_64": 252}.get(os.uname().machine, 31)
    return int(ctypes.CDLL(None).syscall(number, 1, pid))


class Sniffer:
    """Counts packets that leave through the one interface, other than those of IPv6 itself."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self.socket.bind(("out", 3))
        self.socket.setblocking(False)

    def packets(self) -> int:
        count = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = self.socket.recv(2048)
                (kind,) = struct.unpack(">H", frame[12:14])
                of_ipv6 = kind == 0x86DD and frame[20] in (0, 58)
                count += not of_ipv6
        return count


def processes() -> set[int]:
    """Of this namespace."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if _line(int(name), "State").split()[1] != "Z":
                found.add(int(name))
    return found


def observe(names: dict[str, Any], kind: str, route: str, missing: str) -> Row:
    body = KINDS[kind][route]
    scope = dict(names)
    exec(HEADER + "def route():\n" + textwrap.indent(body, "    "), scope)
    read, write = os.pipe()
    os.set_blocking(read, False)

    def program() -> None:
        torch.ones(4, device="cuda")
        try:
            scope["route"]()
            answer = "ok"
        except BaseException as error:
            answer = repr(error)
        os.write(write, answer.encode()[:200])

    victim = Victim()
    names["sniffer"].packets()
    scope.update(VICTIM=victim.pid, CALLER=os.getpid())
    before, heard = processes(), list[int]()
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    priority, host = os.getpriority(os.PRIO_PROCESS, 0), socket.gethostname()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with contextlib.suppress(oomph.OomphError):
            oomph.predict(program)
    time.sleep(0.05)
    harm = list(victim.harm())
    if heard:
        harm.append("signal of the caller")
    if os.getpriority(os.PRIO_PROCESS, 0) != priority:
        os.setpriority(os.PRIO_PROCESS, 0, priority)
        harm.append("priority of the caller")
    if socket.gethostname() != host:
        socket.sethostname(host)
        harm.append("host name")
    if packets := names["sniffer"].packets():
        harm.append(f"{packets} packets")
    with contextlib.suppress(BlockingIOError):
        harm.append(f"started {os.read(names['started'], 100).decode().strip()}")
    if left := processes() - before:
        harm.append(f"{len(left)} processes left")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    victim.end()
    answer = "no answer"
    with contextlib.suppress(BlockingIOError):
        answer = os.read(read, 400).decode(errors="replace")
    os.close(read)
    os.close(write)
    return Row(kind, route, missing, ", ".join(harm), names["warned"] or bool(warned), answer)


def main() -> None:
    if _INSIDE not in os.environ:
        as_root = [] if os.getuid() == 0 else ["--map-root-user"]
        command = [
            "unshare",
            "--net",
            "--uts",
            "--pid",
            "--fork",
            "--mount-proc",
            *as_root,
            sys.executable,
            "-m",
            "benchmarks.routes_processes",
        ]
        sys.exit(subprocess.run([*command, *sys.argv[1:]], env={**os.environ, _INSIDE: "1"}).returncode)
    subprocess.run(["sh", "-ec", _NETWORK], check=True)
    found, revision = [], rows.revision()
    with tempfile.TemporaryDirectory() as folder:
        helper = Path(folder) / "helper"
        helper.write_text(f"#!/bin/bash\necho once >&{_STARTED}\n")
        helper.chmod(0o755)
        repository = Path(folder) / "repository"
        repository.mkdir()
        make = f"""git init -q; git config diff.external {helper}; git config core.fsmonitor {helper}; echo a > a; git add a
        git -c user.name=a -c user.email=a commit -qm a; echo b > a"""
        subprocess.run(["sh", "-ec", make], cwd=repository, check=True, stderr=subprocess.DEVNULL)
        os.chdir(folder)
        read, write = os.pipe()
        os.dup2(write, _STARTED)
        os.set_inheritable(_STARTED, True)
        os.set_blocking(read, False)
        with contextlib.suppress(BlockingIOError):  # of git while the repository was made
            os.read(read, 100)
        names = {
            "HELPER": str(helper),
            "REPOSITORY": str(repository),
            "CONNECTION": _connection(),
            "started": read,
            "sniffer": Sniffer(),
            "warned": False,
        }
        for missing in ABSENT:
            os.environ[IMITATE] = missing
            names["warned"] = False
            for kind, routes in KINDS.items():
                for route in routes:
                    row = observe(names, kind, route, missing)
                    names["warned"] = row.warned  # once for each reason
                    found.append(row)
                    mark = "FAILED" if row.failed else ""
                    print(
                        f"{missing or 'none':17} {kind:8} {route:45} {row.harm:30} {row.answer[:60]} {mark}"
                    )
    rows.write(RESULTS, [asdict(row) | revision for row in found])
    failed = [row for row in found if row.failed]
    for missing in ABSENT:
        these = [row for row in found if row.missing == missing and row.kind != "works"]
        works = [row for row in found if row.missing == missing and row.kind == "works"]
        harm = sum(bool(row.harm) for row in these)
        good = sum(row.answer == "ok" for row in works)
        print(
            f"without {missing or 'nothing'}: {len(these)} routes, {harm} do harm; {good} of {len(works)} programs work"
        )
    sys.exit(1 if failed else 0)


def _connection() -> int:
    """A descriptor of a connection to another machine, as far as the kernel knows: a UDP socket, which needs no peer."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.connect(("10.254.0.2", 9))
    return made.detach()


if __name__ == "__main__":
    main()
