"""`--sizes`: scripts and functions, predicted with longer batches than those that they load."""

import pytest
import torch
from torch import nn

import oomph
from oomph import Script, UserError
from oomph.cli.main import run
from oomph.records import named_shapes

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Texts(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return {"ids": list(range(1, 2 + (64 if index == 33 else index % 8)))}

def collate(samples):
    longest = max(len(sample["ids"]) for sample in samples)
    ids = torch.tensor([sample["ids"] + [0] * (longest - len(sample["ids"])) for sample in samples])
    return ids, ids != 0, ids.clone()

embedding, head = nn.Embedding(100, 64).cuda(), nn.Linear(64, 100).cuda()
optimizer = torch.optim.AdamW([*embedding.parameters(), *head.parameters()])
for ids, mask, labels in DataLoader(Texts(), batch_size=4, collate_fn=collate):
    ids, mask, labels = ids.cuda(), mask.to("cuda"), labels.to("cuda", non_blocking=True)
    assert mask.shape == labels.shape == ids.shape
    logits = head(embedding(ids)) * mask[..., None]
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return Script(str(tmp_path / "train.py"))


def test_ids_labels_and_masks_of_a_script_get_the_sizes(script):
    found = oomph.predict(script, sizes={"T": 48, "B": 16})
    assert {each.shape for each in found.batch} == {(16, 48)}
    assert any("traced as [16, 48]" in note.text for note in found.notes)
    assert found.peak.allocated > oomph.predict(script).peak.allocated


def test_the_longest_sample_of_the_data_set(script):
    found = oomph.predict(script, sizes="longest")
    assert {each.shape for each in found.batch} == {(4, 65)}
    assert any("T=65, of all 40 samples" in note.text for note in found.notes)


@pytest.mark.usefixtures("in_process")
def test_functions_images_and_workloads():
    def training(made_there=False):
        images = torch.randn(2, 3, 16, 16, device="cuda" if made_there else None).cuda()
        nn.Conv2d(3, 4, 3).cuda()(images).sum().backward()

    found = oomph.predict(training, sizes={"H": 32, "W": 24})
    assert [each.shape for each in found.batch] == [(2, 3, 32, 24)]

    def segmentation():
        model = nn.Conv2d(3, 4, 1).cuda()
        for _ in range(2):
            images, masks = torch.randn(2, 3, 16, 16).cuda(), torch.ones(2, 16, 16, dtype=torch.long).cuda()
            nn.functional.cross_entropy(model(images), masks).backward()

    found = oomph.predict(segmentation, sizes={"H": 32, "W": 24})
    assert [each.shape for each in found.batch] == [(2, 3, 32, 24), (2, 32, 24)]
    with pytest.raises(UserError, match=r"T=8: no such dimension .*\[B=2, C=3, H=16, W=16\]"):
        oomph.predict(training, sizes={"T": 8})
    with pytest.raises(UserError, match="makes its batch there"):
        oomph.predict(lambda: training(True), sizes={"H": 8})
    with pytest.raises(UserError, match="B, T, H, W"):
        oomph.predict(training, sizes={"length": 8})
    model, batch = lambda: nn.Linear(8, 8), lambda device, B: torch.ones(B, 8, device=device)
    work = oomph.Workload(model, batch, lambda model, x: model(x).sum(), sizes={"B": 2})
    assert oomph.predict(work, sizes={"B": 4}).batch[0].shape == (4, 8)
    assert oomph.predict(lambda: work, sizes={"B": 4}).batch[0].shape == (4, 8)


IDS, FLOATS = ((2, 16), torch.long), ((2, 16, 16), torch.float)
MASK, SQUARE_MASK = ((2, 1, 16, 16), torch.bool), ((2, 16, 16), torch.bool)
BIAS = ((2, 1, 16, 16), torch.float)
IMAGES, LABEL_MAP = ((2, 3, 16, 16), torch.float), ((2, 16, 16), torch.long)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("batch", "resized", "named"),
    [
        (
            (IDS, MASK, SQUARE_MASK),
            [(2, 32), (2, 1, 32, 32), (2, 32, 32)],
            "[B=2, T=32], [B=2, 1, T=32, T=32], [B=2, T=32, T=32]",
        ),
        (
            (IDS, BIAS, FLOATS),
            [(2, 32), (2, 1, 32, 32), (2, 32, 16)],
            "[B=2, T=32], [B=2, 1, T=32, T=32], [B=2, T=32, F=16]",
        ),
        ((MASK, FLOATS), [(2, 1, 8, 12), (2, 16, 16)], "[B=2, C=1, H=8, W=12], [B=2, 16, 16]"),
        ((IMAGES, LABEL_MAP), [(2, 3, 8, 12), (2, 8, 12)], "[B=2, C=3, H=8, W=12], [B=2, H=8, W=12]"),
        ((IMAGES, SQUARE_MASK), [(2, 3, 8, 12), (2, 8, 12)], "[B=2, C=3, H=8, W=12], [B=2, H=8, W=12]"),
        ((LABEL_MAP, IMAGES), [(2, 8, 12), (2, 3, 8, 12)], "[B=2, H=8, W=12], [B=2, C=3, H=8, W=12]"),
    ],
)
def test_masks_of_tokens_and_of_images(batch, resized, named):
    def training():
        for shape, dtype in batch:
            torch.ones(shape, dtype=dtype).cuda()
        nn.Linear(1, 1).cuda()(torch.ones(1, 1, device="cuda")).sum().backward()

    asked = {name: size for name, size in {"T": 32, "H": 8, "W": 12}.items() if f"{name}=" in named}
    found = oomph.predict(training, sizes=asked)
    assert [each.shape for each in found.batch] == resized
    assert ", ".join(named_shapes(found.batch)) == named


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("layer", "shape", "sizes", "resized"),
    [
        (nn.Conv1d(1, 4, 3), (2, 1, 160), {"T": 320}, (2, 1, 320)),  # mono audio
        (nn.Conv1d(8, 4, 3), (2, 8, 160), {"160": 320}, (2, 8, 320)),
        (nn.Conv3d(1, 4, 3), (2, 1, 16, 24, 24), {"24": 32, "B": 3}, (3, 1, 16, 32, 32)),
        (nn.Linear(8, 4), (2, 30, 8), {"T": 60}, (2, 60, 8)),
    ],
)
def test_dimensions_without_a_sure_name(layer, shape, sizes, resized):
    def training():
        layer.cuda()(torch.randn(shape).cuda()).sum().backward()

    found = oomph.predict(training, sizes=sizes)
    assert [each.shape for each in found.batch] == [resized]
    assert named_shapes(found.batch) == [f"[B={resized[0]}, {', '.join(map(str, resized[1:]))}]"]


@pytest.mark.usefixtures("in_process")
def test_lengths_of_audio_beside_ids():
    samples = [(torch.zeros(1, 160 + i), torch.ones(16 - i, dtype=torch.long)) for i in range(4)]

    def training():
        for audio, ids in torch.utils.data.DataLoader(samples):
            audio.cuda(), ids.cuda()
        nn.Linear(1, 1).cuda()(torch.ones(1, 1, device="cuda")).sum().backward()

    with pytest.raises(
        UserError, match=r"\[1, 1, 160\] as well as ids \[1, 16\] .*, as --sizes 160=32 or 16=32"
    ):
        oomph.predict(training, sizes={"T": 32})
    found = oomph.predict(training, sizes="longest")
    assert {each.shape for each in found.batch} == {(1, 1, 163), (1, 16)}


SPEECH = """
import random, sys
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

seed, shortest, longest, *lists = map(int, sys.argv[1:])
torch.manual_seed(seed)
lengths = [longest, *(random.randint(shortest, longest) for _ in range(31))]
samples = [(torch.randn(t, 8), torch.ones(t // 10, dtype=torch.long)) for t in lengths]

def collate(samples):
    audio, ids = zip(*sorted(samples, key=lambda sample: -len(sample[0])))
    given = [len(each) for each in audio]
    audio, ids = pad_sequence(audio, batch_first=True), pad_sequence(ids, batch_first=True)
    return audio, given if lists else torch.tensor(given), ids

rnn, head = nn.LSTM(8, 32, batch_first=True).cuda(), nn.Linear(32, 4).cuda()
optimizer = torch.optim.SGD([*rnn.parameters(), *head.parameters()], 0.1)
for audio, n, ids in torch.utils.data.DataLoader(samples, 4, shuffle=True, collate_fn=collate, num_workers=2):
    audio, ids = audio.cuda(), ids.cuda()
    packed = pack_padded_sequence(audio, n, batch_first=True)
    head(rnn(packed)[0].data).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def predict_speech(folder, *arguments, sizes=None):
    (folder / "speech.py").write_text(SPEECH)
    return oomph.predict(Script(str(folder / "speech.py"), tuple(map(str, arguments))), sizes=sizes)


def test_lengths_on_the_host_are_those_of_the_sizes(tmp_path):
    most = predict_speech(tmp_path, 0, 200, 200).peak
    assert predict_speech(tmp_path, 0, 100, 200, sizes="longest").peak == most
    longer = predict_speech(tmp_path, 0, 400, 400)
    first = predict_speech(tmp_path, 0, 100, 200).batch[0].shape[1]
    found = predict_speech(tmp_path, 0, 100, 200, 1, sizes={str(first): 400})  # batches of all lengths
    assert {one.shape for one in found.batch if len(one.shape) == 3} == {(4, 400, 8)}
    assert max(one.shape[1] for one in found.batch if len(one.shape) == 2) <= 20
    assert found.peak.allocated == pytest.approx(longer.peak.allocated, rel=0.001)  # but for the ids
    twice = predict_speech(tmp_path, 0, 200, 200, 1, sizes={"B": 8})
    assert not twice.assumptions
    assert twice.peak.allocated == pytest.approx(longer.peak.allocated, rel=0.05)  # as many rows


def test_lengths_in_memory_of_numpy_and_lengths_computed_on_the_gpu(tmp_path):
    (tmp_path / "numpy_lengths.py").write_text("""
import numpy, torch
from torch.nn.utils.rnn import pack_padded_sequence

def collate(samples):
    return torch.stack(samples), torch.from_numpy(numpy.array([len(each) for each in samples]))

rnn = torch.nn.LSTM(8, 32, batch_first=True).cuda()
optimizer = torch.optim.SGD(rnn.parameters(), 0.1)
for audio, n in torch.utils.data.DataLoader([torch.ones(20, 8)] * 16, 4, collate_fn=collate):
    audio = audio.cuda()
    lengths = (audio.sum(2) != 0).sum(1).cpu()
    rnn(pack_padded_sequence(audio, n, batch_first=True))[0].data.sum().backward()
    rnn(pack_padded_sequence(audio, lengths, batch_first=True))[0].data.sum().backward()
    optimizer.step()
""")
    found = oomph.predict(Script(str(tmp_path / "numpy_lengths.py")), sizes={"B": 8})
    assert {one.shape for one in found.batch if len(one.shape) == 3} == {(8, 20, 8)}
    assert not found.assumptions


@pytest.mark.usefixtures("in_process")
def test_lengths_that_are_not_those_of_the_sizes():
    def training():
        rnn = nn.LSTM(8, 16).cuda()
        padded = torch.randn(50, 4, 8).cuda()
        packed = nn.utils.rnn.pack_padded_sequence(padded, torch.tensor([50, 40, 30, 20]))
        rnn(packed)[0].data.sum().backward()

    (assumed,) = oomph.predict(training, sizes={"50": 100}).assumptions
    assert "lower bound" in assumed.text
    assert not oomph.predict(training).assumptions


def test_batches_of_other_lengths_in_every_step(tmp_path):
    found = predict_speech(tmp_path, 0, 1000, 2000)
    assert "--sizes longest" in found.assumptions[0].text
    assert any("traced steps need from" in note.text for note in found.notes)
    assert not predict_speech(tmp_path, 0, 200, 200).assumptions


def test_a_program_without_seeds_is_predicted_alike(script):
    text = SCRIPT.replace("batch_size=4", "batch_size=4, shuffle=True")
    with open(script.path, "w") as file:
        file.write(text)
    torch.manual_seed(1)
    before = oomph.predict(script)
    torch.manual_seed(2)
    assert oomph.predict(script).batch == before.batch


def test_a_failure_after_a_wrong_guess_is_blamed_on_the_size(tmp_path, capsys):
    (tmp_path / "train.py").write_text("""
import torch
model = torch.nn.Conv1d(8, 4, 3).cuda()
model(torch.randn(2, 8, 160).cuda()).sum().backward()
""")
    assert run(["predict", str(tmp_path / "train.py"), "--sizes", "T=320"]) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert "train.py:4" in last
    assert "because of --sizes" in last
    assert "[2, 8, 160] are traced as [2, 320, 160]" in last


@pytest.mark.usefixtures("in_process")
def test_vectors_that_neither_the_model_nor_the_loss_takes_are_no_batch():
    """A noise schedule, and what a trainer gathers from all ranks."""

    def train():
        schedule, weights = torch.linspace(0, 1, 2000).cuda(), torch.ones(5).cuda()
        model = nn.Linear(8, 5).cuda()
        for _ in range(2):
            images, labels = torch.randn(4, 8).cuda(), torch.zeros(4, dtype=torch.long).cuda()
            assert torch.tensor([4, 8]).cuda().numel() == 2
            noised = images + schedule[torch.randint(0, 2000, (4, 1), device="cuda")]
            nn.functional.cross_entropy(model(noised), labels, weights).backward()

    assert named_shapes(oomph.predict(train).batch) == ["[B=4, 8]", "[B=4]"]

    def graphs():  # a label for each graph, and for each node its graph
        nodes, graph, labels = torch.randn(12, 8).cuda(), torch.arange(12).cuda() // 4, torch.zeros(3).cuda()
        pooled = (
            nn.Linear(8, 1).cuda()(nodes).new_zeros(3, 1).index_add(0, graph, nn.Linear(8, 1).cuda()(nodes))
        )
        (pooled[:, 0] - labels).square().mean().backward()

    assert [one.shape for one in oomph.predict(graphs).batch] == [(12, 8), (12,), (3,)]


@pytest.mark.usefixtures("in_process")
def test_sparse_graphs_are_no_batch():
    def train():
        graph = torch.eye(500).to_sparse().cuda()
        table = nn.Embedding(500, 8).cuda()
        optimizer = torch.optim.SGD(table.parameters())

        def step():
            items = torch.zeros(4, 16, dtype=torch.long).cuda()
            torch.sparse.mm(graph, table.weight)[items].sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    assert named_shapes(oomph.predict(train).batch) == ["[B=4, T=16]"]
    assert named_shapes(oomph.predict(train, sizes={"T": 64}).batch) == ["[B=4, T=64]"]
