# ruff: noqa: E501
"""A predicted program changes no file, no thread and no flag of the process that asks."""

import ctypes
import errno
import importlib.util
import multiprocessing
import os
import random
import resource  # noqa: F401  # of OUTSIDE
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode as get_current_dispatch_mode

import oomph
from oomph.errors import ProgramError, UserError
from oomph.prediction import isolation, keeper

BEFORE = {
    "weights.pt": b"weights",
    "weights.npy": b"array",
    "weights.safetensors": b"tensors",
    "log.txt": b"one line\n",
    "data.csv": b"a,b\n",
    "old/a.bin": b"a",
    "old/b.bin": b"b",
    "deep/er/c.bin": b"c",
}

# Each writes, deletes, renames or appends in the current folder, and checks that it sees what it did.
PROGRAMS = {
    "open": "open('weights.pt', 'wb').write(b'new'); assert open('weights.pt', 'rb').read() == b'new'",
    "open new": "open('new', 'w').write('x'); assert 'new' in os.listdir('.')",
    "append": "open('log.txt', 'a').write('more'); assert open('log.txt').read() == 'one line\\nmore'",
    "update": "f = open('log.txt', 'r+'); f.write('ONE'); f.close(); assert open('log.txt').read() == 'ONE line\\n'",
    "exclusive": "open('fresh', 'x').close(); assert os.path.exists('fresh')",
    "io.open": "io.open('log.txt', 'w').close(); assert os.path.getsize('log.txt') == 0",
    "os.open": "fd = os.open('log.txt', os.O_WRONLY | os.O_TRUNC); os.write(fd, b'x'); os.close(fd)",
    "pathlib": "p = Path('log.txt'); p.write_text('x'); assert p.read_text() == 'x'; p.unlink(); assert not p.exists()",
    "pathlib tree": "Path('a/b').mkdir(parents=True); Path('a/b/c').touch(); assert list(Path('a').rglob('c'))",
    "remove": "os.remove('weights.pt'); assert not os.path.exists('weights.pt')",
    "imported by name": "remove('log.txt'); assert not os.path.exists('log.txt')",
    "rmtree": "shutil.rmtree('old'); assert not os.path.isdir('old'); assert 'old' not in os.listdir('.')",
    "rmtree and again": "shutil.rmtree('old'); os.mkdir('old'); assert os.listdir('old') == []",
    "rename": "os.rename('log.txt', 'l2'); assert not os.path.exists('log.txt'); assert open('l2').read()",
    "rename folder": "os.rename('old', 'moved'); assert sorted(os.listdir('moved')) == ['a.bin', 'b.bin']",
    "replace": "open('tmp', 'w').write('x'); os.replace('tmp', 'weights.pt'); assert open('weights.pt').read() == 'x'",
    "move": "shutil.move('log.txt', 'old/log.txt'); assert open('old/log.txt').read()",
    "copy": "shutil.copy('log.txt', 'data.csv'); assert open('data.csv').read() == 'one line\\n'",
    "copytree": "shutil.copytree('old', 'copy'); assert len(os.listdir('copy')) == 2",
    "truncate": "os.truncate('log.txt', 3); assert os.path.getsize('log.txt') == 3",
    "chmod": "os.chmod('log.txt', 0o600); os.utime('log.txt', (1, 1))",
    "symlink": "os.symlink('log.txt', 'link'); assert open('link').read() == 'one line\\n'",
    "symlink to a folder": "os.symlink('old', 'latest'); open('latest/new', 'w').close(); assert 'new' in os.listdir('old') and 'new' in os.listdir('latest')",
    "symlink to a new folder": "os.makedirs('runs/1'); os.symlink('runs/1', 'latest'); open('latest/x', 'w').close(); assert os.path.exists('runs/1/x')",
    "symlink to another folder": "os.symlink('old', 'latest'); open('latest/x', 'w').close(); os.remove('latest'); os.mkdir('runs'); os.symlink('runs', 'latest'); open('latest/y', 'w').close(); assert os.listdir('runs') == ['y']",
    "symlinked folder": "open('linked/new', 'w').close(); assert 'new' in os.listdir('linked') and glob.glob('linked/*')",
    "multiprocessing spawn": "refused(lambda: multiprocessing.get_context('spawn').Process(target=print).start())",
    "locks for spawn": "multiprocessing.get_context('spawn').Value('i', 0).value += 1",
    "tensors of a forked process": "q = torch.multiprocessing.get_context('fork').Queue(); p = torch.multiprocessing.get_context('fork').Process(target=lambda: (q.put(torch.ones(4)), q.get())); p.start(); assert q.get(timeout=60).tolist() == [1.0] * 4; q.put(0); p.join()",
    "options of queries": "refused(lambda: subprocess.run(['git', 'log', '--output=log.txt'])); assert os.system('hostname x')",
    "hard link": "os.link('log.txt', 'link'); assert open('link').read() == 'one line\\n'",
    "makedirs": "os.makedirs('x/y/z', exist_ok=True); assert os.path.isdir('x/y/z')",
    "walk and remove": "[os.remove(os.path.join(r, f)) for r, _, fs in os.walk('deep') for f in fs]",
    "glob": "[os.unlink(f) for f in glob.glob('*.pt')]; assert not glob.glob('*.pt')",
    "tempfile": "f = tempfile.NamedTemporaryFile(dir='.', delete=False); f.write(b'x'); f.close(); os.replace(f.name, 'log.txt')",
    "temporary folder": "d = tempfile.TemporaryDirectory(dir='.'); open(d.name + '/x', 'w').close(); d.cleanup()",
    "json": "json.dump({}, open('data.csv', 'w'))",
    "csv": "csv.writer(open('data.csv', 'w')).writerow([1])",
    "pickle": "pickle.dump({'w': w}, open('weights.pt', 'wb')); assert pickle.load(open('weights.pt', 'rb'))['w'].shape == w.shape",
    "numpy save": "np.save('weights.npy', w.detach().cpu().numpy()); assert np.load('weights.npy').shape == (4, 4)",
    "numpy savez": "np.savez('arrays.npz', a=w.detach().cpu().numpy())",
    "numpy tofile": "w.detach().cpu().numpy().tofile('weights.npy'); assert os.path.getsize('weights.npy') == 64",
    "numpy memmap": "m = np.memmap('weights.npy', mode='w+', shape=(8,)); m[:] = 1; m.flush()",
    "torch.save": "torch.save(model.state_dict(), 'weights.pt'); s = torch.load('weights.pt'); assert s['weight'].shape == (4, 4)",
    "torch.save atomic": "torch.save(model.state_dict(), 'tmp'); os.replace('tmp', 'weights.pt'); assert os.path.exists('weights.pt')",
    "torch.save buffer": "b = io.BytesIO(); torch.save(model.state_dict(), b); open('weights.pt', 'wb').write(b.getvalue())",
    "safetensors": "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')",
    "sqlite": "c = sqlite3.connect('log.db'); c.execute('create table t (a)'); c.commit(); assert os.path.exists('log.db')",
    "logging": "logging.getLogger('x').addHandler(logging.FileHandler('log.txt')); logging.getLogger('x').error('hi')",
    "zip": "z = zipfile.ZipFile('a.zip', 'w'); z.writestr('x', 'y'); z.close(); assert zipfile.is_zipfile('a.zip')",
    "open file of the caller": "caller.write('x'); caller.flush()",
    "chdir": "os.chdir('old'); open('a.bin', 'w').write('x'); os.remove('b.bin'); assert os.listdir('.') == ['a.bin']",
    "import": "os.mkdir('metrics'); Path('metrics/loss.py').write_text('x = 1'); sys.path.append(os.getcwd()); from metrics import loss; assert loss.x == 1",
    "subprocess": "refused(lambda: subprocess.run(['rm', 'log.txt']))",
    "os.system": "assert os.waitstatus_to_exitcode(os.system('rm log.txt')) == 127 and os.path.exists('log.txt')",
    "description of the machine": "from torch.utils import collect_env; assert torch.__version__ in collect_env.get_pretty_env_info()",
    "Unix socket": "s = socket.socket(socket.AF_UNIX); s.bind('server'); s.listen(); k = socket.socket(socket.AF_UNIX); k.connect('server'); assert 'server' in os.listdir('.')",
    "Unix socket with a long path": "os.mkdir('d' * 120); path = os.path.abspath('d' * 120 + '/s'); s = socket.socket(socket.AF_UNIX); s.bind(path); s.listen(); socket.socket(socket.AF_UNIX).connect(path)",
    "abstract socket": "s = socket.socket(socket.AF_UNIX); s.bind('\\0program'); s.listen(); socket.socket(socket.AF_UNIX).connect('\\0program')",
    "servers on this machine": "s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())",
    "signals and priorities of its own": "p = os.fork() or os._exit(signal.pause() or 0); os.kill(p, signal.SIGKILL); os.waitpid(p, 0); os.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0))",
    "below os": "posix.unlink('log.txt'); assert not os.path.exists('log.txt')",
    "functions of os": "assert type(open) is type(os.stat) is type(print) and pickle.loads(pickle.dumps([open, os.stat])) == [open, os.stat]",
    "C library": "ctypes.CDLL(None).unlink(b'log.txt'); assert os.path.exists('log.txt')",
}
ENDINGS = {
    "returns": "",
    "raises": "raise ValueError('mine')",
    "exits": "sys.exit(0)",
    "os._exit": "os._exit(0)",
}
HEADER = """
import csv, ctypes, glob, io, json, logging, multiprocessing, os, pickle, posix, shutil, signal, socket, sqlite3, struct, subprocess, sys, tempfile, zipfile
from pathlib import Path
import numpy as np, safetensors.torch, torch

def refused(call):
    try:
        call()
    except PermissionError:
        return
    raise AssertionError("not refused")

def program():
    model = torch.nn.Linear(4, 4, bias=False, device="cuda")
    w = model.weight
    model(torch.randn(2, 4, device="cuda")).sum().backward()
"""


# Each fails with this errno: nothing leaves the machine, and another process stays as it is.
OUTSIDE = {
    "UDP": (errno.ENETUNREACH, "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.77', 9))"),
    "UDP, C": (errno.ENETUNREACH, "c('sendto', udp.fileno(), b'x', 1, 0, far, 16)"),
    "TCP, C": (errno.ENETUNREACH, "c('connect', socket.socket().fileno(), far, 16)"),
    "DNS": (socket.EAI_AGAIN, "socket.getaddrinfo('example.com', 80)"),
    "raw": (errno.EPERM, "c('socket', socket.AF_INET, socket.SOCK_RAW, 1)"),
    "kill": (errno.EPERM, "os.kill(victim, signal.SIGUSR1)"),
    "kill, C": (errno.EPERM, "c('kill', victim, signal.SIGUSR1)"),
    "killpg": (errno.EPERM, "os.killpg(os.getpgid(victim), signal.SIGUSR1)"),
    "kill of all": (errno.EPERM, "c('kill', -1, signal.SIGUSR1)"),
    "tgkill, C": (errno.EPERM, "c('tgkill', victim, victim, signal.SIGUSR1)"),
    "setpriority": (errno.EPERM, "os.setpriority(os.PRIO_PROCESS, victim, 7)"),
    "prlimit": (errno.EPERM, "resource.prlimit(victim, resource.RLIMIT_NOFILE, (50, 50))"),
    "sched_setaffinity": (errno.EPERM, "os.sched_setaffinity(victim, {0})"),
    "ptrace, C": (errno.EPERM, "c('ptrace', 16, victim, 0, 0)"),
    "execv, C": (errno.EPERM, "c('execv', b'/bin/true', (ctypes.c_char_p * 2)(b'true'))"),
    "chmod, C": (errno.EPERM, "c('chmod', b'/tmp', 0o700)"),
    "unlink, C": (errno.EACCES, "c('unlink', b'/etc/hosts')"),
    "socket of another process": (errno.ECONNREFUSED, "socket.socket(socket.AF_UNIX).connect(b'\\0' + name)"),
}


def folder_in(path):
    return {
        str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()
    }


def filled(folder):
    for name, content in BEFORE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "linked").symlink_to(folder / "deep")
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return filled(tmp_path)


def made(body, **names):
    scope = dict(names)
    exec(HEADER + textwrap.indent(body, "    "), scope)
    return scope["program"]


def test_a_program_sees_its_own_changes_and_the_folders_stay(tmp_path):
    """All of PROGRAMS in one prediction, each in a folder of its own."""
    folders = {name: filled(tmp_path / str(number)) for number, name in enumerate(PROGRAMS)}
    with (tmp_path / "caller.txt").open("w") as caller:
        programs = {name: made(body, caller=caller, remove=os.remove) for name, body in PROGRAMS.items()}
        before = folder_in(tmp_path)

        def program():
            for name, run in programs.items():
                os.chdir(folders[name])
                try:
                    run()
                except Exception as error:
                    raise AssertionError(f"{name}: {error!r}") from error

        oomph.predict(program)
        assert folder_in(tmp_path) == before


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_folder_stays_however_the_program_ends(ending, folder):
    before = folder_in(folder)
    body = "shutil.rmtree('old'); open('weights.pt', 'w').write('x')\n" + ENDINGS[ending]
    if ending == "returns":
        oomph.predict(made(body))
    else:
        with pytest.raises(ProgramError):
            oomph.predict(made(body))
    assert folder_in(folder) == before


def test_a_crash_of_the_program_is_its_own(folder):
    with pytest.raises(ProgramError, match="SIGABRT"):
        oomph.predict(made("os.abort()"))


def test_other_threads_notice_nothing(folder):
    """A thread that saves, trains and asks for CUDA beside a prediction does all of it for real."""
    failures = []
    stop = threading.Event()

    def busy(name):
        try:
            model = torch.nn.Linear(8, 8)
            optimizer = torch.optim.AdamW(model.parameters())
            count = 0
            while not stop.is_set() or count < 3:
                assert torch.cuda.is_available() == available
                model(torch.randn(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                file = folder / f"{name}{count % 3}.pt"
                torch.save(model.state_dict(), file)
                assert torch.load(file)["weight"].shape == (8, 8)
                count += 1
        except BaseException as error:
            failures.append(error)

    available = torch.cuda.is_available()
    alone = oomph.predict(made("pass"))
    threads = [threading.Thread(target=busy, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    beside = [oomph.predict(made("pass")) for _ in range(3)]
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(one.peak == alone.peak and one.events == alone.events for one in beside)


def test_what_a_program_sets_ends_with_it():
    def state():
        return (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.empty(0).device.type,
            torch.is_grad_enabled(),
            torch.get_rng_state().sum().item(),
            os.getcwd(),
            repr(torch.tensor([1 / 3])),
            len(torch.nn.modules.module._global_forward_hooks),
        )

    before = state()
    oomph.predict(
        made(
            "torch.device('cuda').__enter__(); torch.set_num_threads(3); torch.set_default_dtype(torch.float64)\n"
            "torch.backends.cudnn.enabled = False; torch.set_printoptions(precision=1); torch.manual_seed(5)\n"
            "torch.nn.modules.module.register_module_forward_hook(lambda *a: None)\n"
            "torch.inference_mode().__enter__(); os.chdir('/')\n"
        )
    )
    assert state() == before


def test_a_program_draws_the_numbers_that_the_caller_would_draw():
    state = random.getstate()
    expected = random.random()
    random.setstate(state)

    def program():
        assert random.random() == expected
        torch.empty(3, device="cuda")

    oomph.predict(program)
    assert random.getstate() == state


def _threads_and_interrupts(rank, port, interrupted):
    torch.set_num_threads(2)
    torch.randn(10**6).exp()

    def sets_threads():
        assert torch.get_num_threads() == 2
        torch.set_num_threads(4)
        assert torch.get_num_threads() == 4
        torch.randn(40000).exp().sum()
        torch.empty(3, device="cuda")

    oomph.predict(sets_threads)
    assert torch.get_num_threads() == 2

    def program():
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)]).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            Path("weights.pt").write_text("x")
            model(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    moments = random.Random(0)
    for _ in range(10):
        timer = threading.Timer(moments.uniform(0, 0.12), lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        try:
            oomph.predict(program)
            timer.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            interrupted.value += 1
        assert not torch.cuda.is_available() or os.path.exists("/dev/nvidia0")
        assert type(torch.ones(2)) is torch.Tensor
        assert float(torch.ones(2).sum()) == 2.0
        assert get_current_dispatch_mode() is None


def test_threads_and_interrupts(folder, run_ranks):
    """In a process of its own: a forked child would wait for its OpenMP threads, and SIGINT comes at ten
    moments of a prediction."""
    before = folder_in(folder)
    interrupted = multiprocessing.Value("i", 0)
    run_ranks(_threads_and_interrupts, 1, interrupted)
    assert interrupted.value >= 3
    assert folder_in(folder) == before


def test_a_process_that_the_program_leaves_behind_is_not_waited_for(folder):
    began = time.monotonic()
    with pytest.raises(ProgramError, match=r"os\._exit"):
        oomph.predict(made("os.fork() or __import__('time').sleep(60)\nos._exit(0)"))
    assert time.monotonic() - began < 30


def test_a_child_that_waits_for_a_lock_of_another_thread_is_started_again(monkeypatch):
    monkeypatch.setattr(isolation, "_STUCK_S", 1.0)
    lock, forked = threading.Lock(), threading.Event()

    def hold():
        with lock:
            forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    before = os.fork

    def fork():
        child = before()
        if child:
            forked.set()
        return child

    monkeypatch.setattr(os, "fork", fork)

    def program():
        with lock:
            torch.empty(4, device="cuda")

    assert oomph.predict(program).peak.allocated == 512
    thread.join()


def test_a_fork_that_waits_for_a_thread_is_not_taken_for_a_refusal(monkeypatch):
    monkeypatch.setattr(isolation, "_STUCK_S", 0.5)

    def search(progress):
        try:
            list(isolation.run_forked([lambda: None], 1, continues=True))
        except isolation.ContinueInFork:
            time.sleep(60)
        except isolation.ForkWaits:
            return "waits"
        return "ended"

    assert isolation.run_isolated(search, lambda text, fraction: None) == "waits"


def waited_for(pid):
    for _ in range(100):
        try:
            os.kill(pid, 0)
            time.sleep(0.1)
        except ProcessLookupError:
            return True
    os.kill(pid, signal.SIGKILL)
    return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_nothing_of_a_killed_prediction_goes_on_or_stays(number, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    read, write = os.pipe()

    def program():
        Path("weights.pt").write_text("x")
        os.fork()
        os.write(write, b"%d " % os.getpid())
        time.sleep(60)

    parent = os.fork()
    if parent == 0:
        oomph.predict(program)
    children = b""
    while children.count(b" ") < 2:
        children += os.read(read, 100)
    assert list(tmp_path.iterdir())
    os.kill(parent, number)
    assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == -number
    left = [child for child in children.split() if not waited_for(int(child))]
    assert not left
    for _ in range(50):
        if not list(tmp_path.iterdir()):
            return
        time.sleep(0.1)
    pytest.fail("the scratch folder is left")


def test_what_killed_keepers_left_is_removed_later(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    of_others = tmp_path / "oomph-scratch-results"  # the user's
    used, left = keeper.Scratch(), keeper.Scratch()
    os.close(left.lock)
    of_others.mkdir()
    for path in (of_others, used.path, left.path):
        os.utime(path, (1, 1))
    keeper.remove_left_folders()
    assert {path.name for path in tmp_path.iterdir()} == {of_others.name, os.path.basename(used.path)}
    os.close(used.lock)


def test_a_folder_is_removed_alone(tmp_path):
    """Its parent, and what links in it lead to, keep their modes."""
    folder, others = tmp_path / "folder", tmp_path / "others"
    (folder / "closed").mkdir(parents=True)
    (folder / "closed" / "file").touch()
    others.mkdir(mode=0o755)
    (folder / "link").symlink_to(others)
    (folder / "closed").chmod(0)
    before = [path.stat().st_mode for path in (tmp_path, others)]
    for _ in range(2):  # once it is not there
        keeper.remove(str(folder))
        assert not folder.exists()
        assert [path.stat().st_mode for path in (tmp_path, others)] == before


def test_what_a_program_starts_ends_with_it():
    read, write = os.pipe()

    def program():
        torch.empty(4, device="cuda")
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(write, b"%d" % os.getpid())
                time.sleep(60)
            os._exit(0)
        os.wait()

    oomph.predict(program)
    with pytest.raises(ProcessLookupError):
        os.kill(int(os.read(read, 100)), 0)


def attempts(victim, name):
    """What each of OUTSIDE fails with, tried in a predicted program."""
    read, write = os.pipe()

    def program():
        torch.empty(4, device="cuda")
        libc = ctypes.CDLL(None, use_errno=True)

        def c(name, *arguments):
            if getattr(libc, name)(*arguments) < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

        far = (
            struct.pack("=H", socket.AF_INET)
            + struct.pack(">H", 9)
            + socket.inet_aton("192.0.2.77")
            + bytes(8)
        )
        udp = socket.socket(type=socket.SOCK_DGRAM)
        for route, (_, body) in OUTSIDE.items():
            try:
                exec(body, {**globals(), "c": c, "far": far, "udp": udp, "victim": victim, "name": name})
                os.write(write, f"{route}=none\n".encode())
            except OSError as error:
                os.write(write, f"{route}={error.errno}\n".encode())

    oomph.predict(program)
    os.close(write)
    with os.fdopen(read) as file:
        return dict(line.strip().split("=") for line in file)


@pytest.mark.parametrize("missing", ["", "landlock"])
def test_a_program_sends_nothing_and_reaches_no_other_process(missing, monkeypatch):
    monkeypatch.setenv("OOMPH_WITHOUT", missing)
    name = b"oomph test %d" % os.getpid()
    with (
        subprocess.Popen(["sleep", "60"], start_new_session=True) as victim,
        socket.socket(socket.AF_UNIX) as server,
    ):
        server.bind(b"\0" + name)
        server.listen()
        priority = os.getpriority(os.PRIO_PROCESS, victim.pid)
        found = attempts(victim.pid, name)
        assert victim.poll() is None
        assert os.getpriority(os.PRIO_PROCESS, victim.pid) == priority
        victim.kill()
    if missing:
        assert found == {route: str(expected) for route, (expected, _) in OUTSIDE.items()}
    else:  # Landlock has its own errno for abstract sockets
        refused = {str(expected) for expected, _ in OUTSIDE.values()} | {str(errno.EPERM)}
        assert set(found) == set(OUTSIDE)
        assert set(found.values()) <= refused


def test_missing_protection_is_named_first(monkeypatch, folder):
    monkeypatch.setenv("OOMPH_WITHOUT", "landlock seccomp")
    with pytest.warns(UserWarning, match="no landlock and seccomp"):
        oomph.predict(made("pass"))
    with pytest.raises(ProgramError, match="cannot send signals"):  # what Python tells
        oomph.predict(made(f"os.kill({os.getpid()}, 9)"))


def test_a_program_may_ask_git_and_start_others_only_if_allowed(folder):
    oomph.predict(made("subprocess.run(['git', '-C', 'a b', 'log', '--format=%h; %s'], capture_output=True)"))
    oomph.predict(made("subprocess.check_output(['nvidia-smi'])"))  # also on a machine without a GPU
    for missing in ("lspci", "no-such-program"):
        oomph.predict(
            made(f"\ntry:\n    subprocess.run([{missing!r}])\nexcept FileNotFoundError:\n    pass\n")
        )
    asked = "git symbolic-ref --short HEAD 2>/dev/null || git -C .. rev-parse --git-dir 2>&1; git status"
    oomph.predict(made(f"subprocess.run({asked!r}, shell=True, capture_output=True)"))
    question = "import sys, json; print(json.dumps(sys.path))"
    oomph.predict(made(f"subprocess.check_output([sys.executable, '-c', {question!r}])"))
    touch = made("subprocess.run(['touch', 'new'], check=True)")
    with pytest.raises(ProgramError, match=r"--allow-subprocesses.*touch new"):
        oomph.predict(touch)
    oomph.predict(touch, allow=["subprocesses"])
    assert (folder / "new").exists()
    with pytest.raises(ProgramError, match=r"--allow-subprocesses.*touch new"):
        oomph.predict(made("subprocess.run('git rev-parse HEAD || touch new', shell=True)"))
    with pytest.raises(UserError, match="subprocesses, network"):
        oomph.predict(touch, allow=["everything"])


def test_a_subprocess_has_the_environment_that_the_program_sees(folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    started = """subprocess.run('test "$CUDA_VISIBLE_DEVICES" = 3', shell=True, check=True)"""
    oomph.predict(made(started), allow=["subprocesses"])


@pytest.fixture
def terminal():
    """The standard input of this process."""
    other_end, terminal = os.openpty()
    stdin = os.dup(0)
    os.dup2(terminal, 0)
    yield terminal
    os.dup2(stdin, 0)
    for file in (other_end, terminal, stdin):
        os.close(file)


def test_a_program_may_ask_for_the_size_of_its_terminal_and_reads_nothing(terminal):
    termios.tcsetwinsize(terminal, (40, 120))
    oomph.predict(
        made(
            "assert os.popen('stty size').read() == '40 120\\n'; assert not any(os.read(0, 1) for _ in range(100))"
        )
    )
    with pytest.raises(ProgramError, match=r"--allow-subprocesses"):
        oomph.predict(made("os.popen('stty size 40')"))


def test_mpi_has_one_process_and_is_not_started(folder, monkeypatch):
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py/__init__.py").write_text("raise SystemExit('started')")
    monkeypatch.syspath_prepend(folder)

    def program():
        import mpi4py

        mpi4py.rc.threads = False
        assert importlib.util.find_spec("mpi4py") is not None
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        assert (world.Get_rank(), world.size, world.bcast("a", root=0), world.gather(1)) == (0, 1, "a", [1])
        torch.ones(4, device="cuda", requires_grad=True).sum().backward()

    assert oomph.predict(program).peak.allocated > 0


def test_without_a_child_process_writes_are_refused(folder, monkeypatch):
    monkeypatch.delattr(os, "fork")
    before = folder_in(folder)
    with pytest.warns(UserWarning, match="predicted in this process"):
        alone = oomph.predict(made("pass"))
    for body in ("open('weights.pt', 'w')", "os.remove('log.txt')", "os.system('rm log.txt')"):
        with (
            pytest.warns(UserWarning, match="in this process"),
            pytest.raises(ProgramError, match="a predicted program cannot"),
        ):
            oomph.predict(made(body))
    in_thread = [
        "import threading",
        "done = []",
        "write = lambda: (refused(lambda: open('weights.pt', 'w')), done.append(True))",
        "thread = threading.Thread(target=write)",
        "thread.start(), thread.join()",
        "assert done",
    ]
    with pytest.warns(UserWarning, match="in this process"):
        oomph.predict(made("\n".join(in_thread)))
    assert folder_in(folder) == before
    monkeypatch.undo()
    assert oomph.predict(made("pass")).peak == alone.peak


def test_a_script_is_predicted_where_forks_cannot_run_backward(folder, monkeypatch):
    """As in a notebook that has run a backward pass on a GPU."""
    (folder / "train.py").write_text(
        "import torch\ntorch.ones(4, device='cuda')\nopen('log.txt', 'w').close()\nraise ValueError('mine')"
    )
    before, messages = folder_in(folder), list[str]()
    monkeypatch.setattr(isolation, "autograd_runs", lambda: False)
    with pytest.raises(ProgramError, match="ValueError: mine"):
        oomph.predict(oomph.Script("train.py"), progress=lambda text, fraction: messages.append(text))
    assert any("train.py" in text for text in messages)
    assert folder_in(folder) == before


def test_safe_open_that_is_imported_after_a_first_trace_reads_what_the_program_wrote(tmp_path, monkeypatch):
    def setup(opens=False):
        model = torch.nn.Linear(8, 8, device="cuda")

        def step():
            model(torch.ones(2, 8, device="cuda")).sum().backward()
            if opens:
                safetensors.torch.save_file({"weight": model.weight.detach()}, tmp_path / "a")
                with sys.modules["__main__"].safe_open(tmp_path / "a", "pt") as file:
                    file.get_tensor("weight")

        return step

    oomph.predict(setup)
    notebook = sys.modules["__main__"]
    monkeypatch.setattr(notebook, "safe_open", safetensors.safe_open, raising=False)
    oomph.predict(lambda: setup(opens=True))
    assert not (tmp_path / "a").exists()
