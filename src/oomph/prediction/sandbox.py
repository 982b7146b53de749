"""What the kernel forbids a predicted program, and programs that it starts.

Landlock refuses changes of files outside the scratch folder. A seccomp filter, made of the table ROWS,
refuses what Landlock does not know: the network, other programs, signals, priorities, the modes and times of
files. Where the answer depends on an address, a path or a process, the filter asks a Supervisor, which runs
in the keeper (keeper.py) and reads the arguments in the memory of the process.

This guards against what programs do by mistake or habit. It is no defence against an attacker: a second
thread can change an address after it was read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import ipaddress
import os
import platform
import posixpath
import re
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from oomph.prediction.commands import may_be_executed

if sys.platform != "win32":
    import fcntl

_PARENT_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38  # of prctl
IMITATE = "OOMPH_WITHOUT"  # of the environment: protections that are taken to be missing, for tests


# Processes --------------------------------------------------------------------------------------------


def state_of(pid: int | str) -> list[str]:
    """The state of a process, its parent, its group and so on, from /proc; empty if there is none."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return []


def is_below(pid: int, ancestor: int) -> bool:
    """Whether the process, or that of a thread, descends from `ancestor`."""
    while pid > 1:
        state = state_of(pid)
        pid = int(state[1]) if state else 0
        if pid == ancestor:
            return True
    return False


def is_own(pid: int, keeper: int) -> bool:
    """Whether `pid`, as of kill, means processes of the program alone, which has a group of its own. Of those
    that do not exist, too: the kernel says so."""
    if pid == -1 or not os.path.isdir("/proc/self"):
        return pid != -1
    if pid >= 0:
        return pid == 0 or not state_of(pid) or is_below(pid, keeper)
    states = {int(name): state_of(name) for name in os.listdir("/proc") if name.isdigit()}
    group = str(-pid)
    return all(is_below(each, keeper) for each, state in states.items() if state[2:3] == [group])


def end_with_parent(number: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number, 0, 0, 0)


def processes_below(ancestor: int) -> dict[int, list[str]]:
    """The states of all descendants; of none where the system is not Linux."""
    names = os.listdir("/proc") if os.path.isdir("/proc/self") else []
    states = {int(name): state_of(name) for name in names if name.isdigit()}
    found: dict[int, list[str]] = {}
    parents = {ancestor}
    while parents:
        new = {pid: state for pid, state in states.items() if state and int(state[1]) in parents}
        found |= new
        parents = set(new)
    return found


def can_read_memory(pid: int) -> bool:
    """Of a descendant: some systems let nobody."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "rb"):
        return True
    return False


# Landlock ---------------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_O_PATH = getattr(os, "O_PATH", 0)
# By ABI version: write, remove, make; refer; truncate.
_FILE_ACCESS = {1: 0b1111111110010, 2: 1 << 13, 3: 1 << 14}
_SCOPES_SINCE, _ABSTRACT_SOCKETS, _SIGNALS = 6, 1, 2


class _Ruleset(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("file_access", "net_access", "scoped"))


class _Rule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("folder", ctypes.c_int32))


def _landlock(libc: ctypes.CDLL, folders: tuple[str, ...], allow: Collection[str]) -> bool:
    """Restrict this process. False: the kernel cannot."""
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    access = sum(rights for since, rights in _FILE_ACCESS.items() if version >= since)
    scopes = _SIGNALS | (0 if "network" in allow else _ABSTRACT_SOCKETS)
    attribute = _Ruleset(access, 0, scopes)
    size = 24 if version >= _SCOPES_SINCE else 8
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(attribute), size, 0)
    if ruleset < 0:
        return False
    for folder in folders:
        fd = libc.open(os.fsencode(folder), _O_PATH | os.O_CLOEXEC)
        if fd >= 0:
            libc.syscall(_ADD_RULE, ruleset, 1, ctypes.byref(_Rule(access, fd)), 0)
            os.close(fd)
    failed = libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return not failed


# The table of system calls ----------------------------------------------------------------------------

# The numbers on x86-64 and aarch64, and all later ones, which are the same everywhere.
_NUMBERS = """
acct 163 89, add_key 248 217, adjtimex 159 171, bind 49 200, bpf 321 280, chmod 90 -, chown 92 -,
chroot 161 51, clock_adjtime 305 266, clock_settime 227 112, connect 42 203, creat 85 -,
delete_module 176 106, execve 59 221, execveat 322 281, fchmod 91 52, fchmodat 268 53,
fchmodat2 452 452, fchown 93 55, fchownat 260 54, fcntl 72 25, finit_module 313 273,
fremovexattr 199 16, fsconfig 431 431, fsetxattr 190 7, fsmount 432 432, fsopen 430 430,
fspick 433 433, futimesat 261 -, init_module 175 105, io_uring_setup 425 425, ioctl 16 29,
ioperm 173 -, iopl 172 -, ioprio_set 251 30, kexec_file_load 320 294, kexec_load 246 104,
keyctl 250 219, kill 62 129, lchown 94 -, link 86 -, linkat 265 37, lremovexattr 198 15,
lsetxattr 189 6, migrate_pages 256 238, mkdir 83 -, mkdirat 258 34, mknod 133 -, mknodat 259 33,
mq_open 240 180, mq_unlink 241 181, msgget 68 186, semget 64 190, shmget 29 194,
mount 165 40, mount_setattr 442 442, move_mount 429 429, move_pages 279 239, open 2 -,
open_by_handle_at 304 265, open_tree 428 428, openat 257 56, openat2 437 437, pidfd_getfd 438 438,
pidfd_open 434 434, pivot_root 155 41, prlimit64 302 261, process_madvise 440 440, process_vm_writev 311 271,
ptrace 101 117, reboot 169 142, removexattr 197 14, removexattrat 466 466, rename 82 -,
renameat 264 38, renameat2 316 276, request_key 249 218, rmdir 84 -, rt_sigqueueinfo 129 138,
rt_tgsigqueueinfo 297 240, sched_setaffinity 203 122, sched_setattr 314 274, sched_setparam 142 118,
sched_setscheduler 144 119, sendmmsg 307 269, sendmsg 46 211, sendto 44 206, setdomainname 171 162,
sethostname 170 161, setns 308 268, setpriority 141 140, settimeofday 164 170, setxattr 188 5,
setxattrat 463 463, socket 41 198, swapoff 168 225, swapon 167 224, symlink 88 -, symlinkat 266 36,
syslog 103 116, tgkill 234 131, tkill 200 130, truncate 76 45, umount2 166 39, unlink 87 -,
unlinkat 263 35, unshare 272 97, utime 132 -, utimensat 280 88, utimes 235 -"""

_LOWER = 0xFFFFFFFF  # half of an argument
_SIZE_OF_MMSGHDR = 64
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SHARED_MEMORY = "/dev/shm/"
_DEVICES = r"/dev/(null|zero|full|u?random|tty|ptmx|pts/\d+|nvidia.*)"
_OF_THE_PROCESS = {"/proc/self": "", "/proc/thread-self": "", "/dev/fd": "/fd"}  # links below /proc/PID
_OF_THE_PROCESS |= {f"/dev/{name}": f"/fd/{fd}" for fd, name in enumerate(("stdin", "stdout", "stderr"))}
_MOST_WORDS, _MOST_MESSAGES = 10_000, 1024
_NO_NETWORK = errno.ENETUNREACH  # what a machine without a network answers


@dataclass(frozen=True)
class _Test:
    argument: int
    mask: int = _LOWER
    value: int | None = None  # None: not 0


# Returns an errno, or 0: go on.
_Decide: TypeAlias = "Callable[[Supervisor, _Process, tuple[int, ...]], int]"


@dataclass(frozen=True)
class _Row:
    calls: str
    answer: int | _Decide
    why: str
    tests: tuple[_Test, ...] = ()
    unless: str = ""  # what is allowed


class _Process:
    """A process that waits in a system call."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def memory(self, address: int, size: int) -> bytes:
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            data = memory.read(size)
        if len(data) < size:  # the process has ended
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return data

    def text(self, address: int) -> str:
        data = b""
        while b"\0" not in data:
            size = 256 - (address + len(data)) % 256  # which ends before the next page
            data += self.memory(address + len(data), size)
        return os.fsdecode(data.partition(b"\0")[0])

    def texts(self, address: int) -> tuple[str, ...]:
        found: list[str] = []
        while len(found) < _MOST_WORDS and (pointer := self.memory(address + 8 * len(found), 8)) != bytes(8):
            found.append(self.text(int.from_bytes(pointer, sys.byteorder)))
        return tuple(found)

    def folder(self, fd: int) -> str:
        """Of a descriptor; of the current folder where there is none."""
        signed = ctypes.c_int32(fd).value
        return os.readlink(f"/proc/{self.pid}/" + ("cwd" if signed < 0 else f"fd/{signed}"))

    def path(self, fd: int, address: int, follow: bool) -> str:
        """An absolute path, links of its folders resolved, of a path relative to the folder `fd`; without a
        path, that of `fd`. `follow`: also where it is a link itself."""
        text = self.text(address) if address else ""
        if not text:
            return self.folder(fd)
        for name, own in _OF_THE_PROCESS.items():
            if text == name or text.startswith(name + "/"):
                text = f"/proc/{self.pid}{own}{text.removeprefix(name)}"
        full = text if text.startswith("/") else posixpath.join(self.folder(fd), text)
        if follow or posixpath.basename(full) in ("", ".", ".."):
            return os.path.realpath(full)
        return posixpath.join(os.path.realpath(posixpath.dirname(full)), posixpath.basename(full))


_HERE, _NO_FOLLOW = 0xFFFFFF9C, 0x100  # AT_FDCWD, AT_SYMLINK_NOFOLLOW
_Place = tuple[int | None, int | None]  # the arguments with a folder's descriptor and with a path


def _paths(
    process: _Process, arguments: tuple[int, ...], places: Sequence[_Place], follow: bool = True
) -> Iterator[str]:
    for folder, text in places:
        fd = _HERE if folder is None else arguments[folder]
        yield process.path(fd, 0 if text is None else arguments[text], follow)


def _content(*places: _Place, follow: bool = False) -> _Decide:
    """Changes a file or a folder."""

    def decide(supervisor: Supervisor, process: _Process, arguments: tuple[int, ...]) -> int:
        found = _paths(process, arguments, places, follow)
        return 0 if all(map(supervisor.may_change, found)) else errno.EACCES

    return decide


def _open(folder: int | None, text: int, flags: int) -> _Decide:
    def decide(supervisor: Supervisor, process: _Process, arguments: tuple[int, ...]) -> int:
        (path,) = _paths(process, arguments, [(folder, text)])
        makes = arguments[flags] & os.O_CREAT and arguments[flags] & os.O_EXCL
        if makes and path.startswith(_SHARED_MEMORY):  # whose names are taken
            return 0
        return 0 if supervisor.may_change(path) else errno.EACCES

    return decide


def _metadata(place: _Place, follow: bool = True, flags: int | None = None) -> _Decide:
    """Changes the mode, the owner, times or attributes of a file. Pipes and sockets have no path.
    `flags`: the argument that may say that a link is meant itself."""

    def decide(supervisor: Supervisor, process: _Process, arguments: tuple[int, ...]) -> int:
        of_link = not follow or (flags is not None and arguments[flags] & _NO_FOLLOW)
        (path,) = _paths(process, arguments, [place], not of_link)
        return 0 if supervisor.is_in_scratch(path) or path[:1] != "/" else errno.EPERM

    return decide


def _of_process(argument: int) -> _Decide:
    """Changes a process: 0 is the caller itself."""

    def decide(supervisor: Supervisor, process: _Process, arguments: tuple[int, ...]) -> int:
        pid = ctypes.c_int32(arguments[argument]).value
        return 0 if pid >= 0 and is_own(pid, os.getpid()) else errno.EPERM

    return decide


def _kill(supervisor: Supervisor, process: _Process, arguments: tuple[int, ...]) -> int:
    pid = ctypes.c_int32(arguments[0]).value
    asks = arguments[1] & _LOWER == 0  # whether it is there
    return 0 if asks or is_own(pid, os.getpid()) else errno.EPERM


def _set_priority(of_process: int) -> _Decide:
    """`of_process`: the first kind; the next are of a group, and of all that the user runs."""

    def decide(supervisor: Supervisor, process: _Process, arguments: tuple[int, ...]) -> int:
        kind, pid = (ctypes.c_int32(each).value for each in arguments[:2])
        if kind == of_process + 1:
            pid = -pid
        is_all = kind not in (of_process, of_process + 1)
        return errno.EPERM if is_all or not is_own(pid, os.getpid()) else 0

    return decide


def _execute(folder: int | None, text: int, words: int) -> _Decide:
    def decide(supervisor: Supervisor, process: _Process, arguments: tuple[int, ...]) -> int:
        (path,) = _paths(process, arguments, [(folder, text)])
        if not os.path.exists(path):  # the kernel says so
            return 0
        allowed = may_be_executed(process.text(arguments[text]) or path, process.texts(arguments[words]))
        return 0 if allowed else errno.EPERM

    return decide


def _connect(supervisor: Supervisor, process: _Process, arguments: tuple[int, ...]) -> int:
    return supervisor.address_errno(process.memory(arguments[1], min(arguments[2], 128)))


def _send_to(supervisor: Supervisor, process: _Process, arguments: tuple[int, ...]) -> int:
    return supervisor.address_errno(process.memory(arguments[4], min(arguments[5], 128)))


def _send_message(supervisor: Supervisor, process: _Process, arguments: tuple[int, ...]) -> int:
    address, size = struct.unpack("=QI", process.memory(arguments[1], 12))
    return supervisor.address_errno(process.memory(address, min(size, 128))) if address else 0


def _send_messages(supervisor: Supervisor, process: _Process, arguments: tuple[int, ...]) -> int:
    messages = (arguments[1] + _SIZE_OF_MMSGHDR * each for each in range(min(arguments[2], _MOST_MESSAGES)))
    answers = (_send_message(supervisor, process, (0, each)) for each in messages)
    return next(filter(None, answers), 0)


def _bind(supervisor: Supervisor, process: _Process, arguments: tuple[int, ...]) -> int:
    address = process.memory(arguments[1], min(arguments[2], 128))
    if int.from_bytes(address[:2], sys.byteorder) != socket.AF_UNIX:
        return 0
    if address[2:3] == b"\0":
        supervisor.own_names.add(address)
    return 0 if address[2:3] in (b"", b"\0") or supervisor.is_own_socket(address) else errno.EACCES


_ADMINISTRATION = (
    "mount umount2 mount_setattr move_mount open_tree fsopen fsconfig fsmount fspick pivot_root chroot "
    "swapon swapoff acct reboot kexec_load kexec_file_load init_module finit_module delete_module "
    "sethostname setdomainname settimeofday clock_settime adjtimex clock_adjtime iopl ioperm bpf setns "
    "unshare syslog add_key keyctl request_key open_by_handle_at"
)
_RAW, _PACKET = 3, 17  # a type of sockets, and a family
ROWS = (
    # Other programs and processes.
    _Row("execve", _execute(None, 0, 1), "only queries are started"),
    _Row("execveat", _execute(0, 1, 2), "only queries are started"),
    _Row("kill", _kill, "signals reach the program's own processes"),
    _Row("tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open", _of_process(0), "as kill"),
    _Row("pidfd_getfd", errno.EPERM, "takes an open file from another process"),
    _Row("fcntl", errno.EPERM, "F_SETOWN: signals to another process", (_Test(1, value=8),)),
    _Row("fcntl", errno.EPERM, "F_SETOWN_EX: likewise", (_Test(1, value=15),)),
    _Row("prlimit64", _of_process(0), "limits of the program's own processes", (_Test(2),)),
    _Row("setpriority", _set_priority(0), "as kill"),
    _Row("ioprio_set", _set_priority(1), "as kill"),
    _Row("sched_setaffinity sched_setscheduler sched_setparam sched_setattr", _of_process(0), "as kill"),
    _Row("migrate_pages move_pages process_vm_writev", _of_process(0), "as kill"),
    _Row("process_madvise", errno.EPERM, "memory of another process"),
    _Row("ptrace", _of_process(1), "as kill", (_Test(0),)),
    _Row("ioctl", errno.EPERM, "TIOCSTI: types into the terminal", (_Test(1, value=0x5412),)),
    _Row("ioctl", errno.EPERM, "FIOSETOWN: as F_SETOWN", (_Test(1, value=0x8901),)),
    _Row("ioctl", errno.EPERM, "SIOCSPGRP: as F_SETOWN", (_Test(1, value=0x8902),)),
    _Row("shmget semget msgget", errno.EACCES, "of a name that others know", (_Test(0),)),
    _Row("mq_open mq_unlink", errno.EACCES, "message queues outlive the program"),
    _Row("io_uring_setup", errno.ENOSYS, "its operations pass no filter"),
    _Row(_ADMINISTRATION, errno.EPERM, "changes the machine: as for users who are not root"),
    # The network.
    _Row("connect", _connect, "addresses of this machine, and sockets of the program", unless="network"),
    _Row("sendto", _send_to, "as connect", (_Test(4),), unless="network"),
    _Row("sendmsg", _send_message, "as connect", unless="network"),
    _Row("sendmmsg", _send_messages, "as connect", unless="network"),
    _Row("bind", _bind, "makes an entry of a folder; names of the program's own Unix sockets"),
    _Row("socket", errno.EPERM, "packets of any kind", (_Test(0, value=_PACKET),), unless="network"),
    *(
        _Row("socket", errno.EPERM, "as above", (_Test(0, value=each), _Test(1, 15, _RAW)), unless="network")
        for each in (socket.AF_INET, socket.AF_INET6)
    ),
    # Modes, owners, times and attributes of files, of which Landlock knows nothing.
    _Row("chmod chown utime utimes setxattr removexattr", _metadata((None, 0)), "files of the user"),
    _Row("lchown lsetxattr lremovexattr", _metadata((None, 0), follow=False), "files of the user"),
    _Row("fchmodat futimesat", _metadata((0, 1)), "files of the user"),
    _Row("utimensat fchmodat2", _metadata((0, 1), flags=3), "files of the user"),
    _Row("fchownat", _metadata((0, 1), flags=4), "files of the user"),
    _Row("setxattrat removexattrat", _metadata((0, 1), flags=2), "files of the user"),
    _Row("fchmod fchown fsetxattr fremovexattr", _metadata((0, None)), "files of the user"),
    # The same as Landlock refuses, and what others share in memory.
    _Row("open", _open(None, 0, 1), "writes", (_Test(1, _WRITES),)),
    _Row("openat", _open(0, 1, 2), "writes", (_Test(2, _WRITES),)),
    _Row("openat2", errno.ENOSYS, "its flags are in memory; C libraries use openat instead"),
    _Row("creat truncate", _content((None, 0), follow=True), "writes"),
    _Row("mkdir rmdir unlink mknod", _content((None, 0)), "changes a folder"),
    _Row("mkdirat unlinkat mknodat", _content((0, 1)), "changes a folder"),
    _Row("rename link", _content((None, 0), (None, 1)), "changes folders"),
    _Row("renameat renameat2 linkat", _content((0, 1), (2, 3)), "changes folders"),
    _Row("symlink", _content((None, 1)), "changes a folder"),
    _Row("symlinkat", _content((1, 2)), "changes a folder"),
)


# The filter -------------------------------------------------------------------------------------------

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # of BPF
_ALLOW, _ERROR, _ASK = 0x7FFF0000, 0x00050000, 0x7FC00000
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16  # in seccomp_data
_MACHINES = {"x86_64": (0xC000003E, 0, 317), "aarch64": (0xC00000B7, 1, 277)}  # AUDIT_ARCH, column, seccomp
_OTHER_X86 = 0x40000000  # numbers of the x32 interface
_SET_FILTER, _NO_SLOWER, _NEW_LISTENER = 1, 1 << 2, 1 << 3


@functools.cache
def _numbers() -> dict[str, int]:
    """Of the system calls that this machine has."""
    column = _MACHINES[platform.machine()][1]
    named = (each.split() for each in _NUMBERS.replace("\n", " ").split(","))
    return {name: int(numbers[column]) for name, *numbers in named if numbers[column] != "-"}


def _rows(allow: Collection[str]) -> list[tuple[int, _Row]]:
    numbers = _numbers()
    used = [row for row in ROWS if row.unless not in allow]
    return [(numbers[name], row) for row in used for name in row.calls.split() if name in numbers]


def _filter(rows: Sequence[tuple[int, _Row]], passes: int) -> list[tuple[int, int, int, int]]:
    """Instructions of BPF. `passes`: the address of the one message that is sent without a question."""
    machine = platform.machine()

    def lower(argument: int) -> int:
        return _ARGUMENTS_AT + 8 * argument  # little-endian machines

    refuse = (_RETURN, 0, 0, _ERROR | errno.ENOSYS)
    code = [(_LOAD, 0, 0, _MACHINE_AT), (_EQUAL, 1, 0, _MACHINES[machine][0]), refuse]
    code.append((_LOAD, 0, 0, _NUMBER_AT))
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, _OTHER_X86), refuse]
    code += [
        (_EQUAL, 0, 6, _numbers()["sendmsg"]),
        (_LOAD, 0, 0, lower(1)),
        (_EQUAL, 0, 3, passes & 0xFFFFFFFF),
        (_LOAD, 0, 0, lower(1) + 4),
        (_EQUAL, 0, 1, passes >> 32),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    for number, row in rows:
        body: list[tuple[int, int, int, int]] = []
        for test in row.tests:
            body += [(_LOAD, 0, 0, lower(test.argument)), (_AND, 0, 0, test.mask)]
            body.append((_EQUAL, 0, -1, test.value) if test.value is not None else (_EQUAL, -1, 0, 0))
        body.append((_RETURN, 0, 0, _ASK if callable(row.answer) else _ERROR | row.answer))
        if row.tests:
            body.append((_LOAD, 0, 0, _NUMBER_AT))
        for position, (operation, then, otherwise, value) in enumerate(body):  # -1: to the last instruction
            last = len(body) - 2 - position
            body[position] = (
                operation,
                last if then < 0 else then,
                last if otherwise < 0 else otherwise,
                value,
            )
        code += [(_EQUAL, 0, len(body), number), *body]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


class _Message(ctypes.Structure):
    """msghdr, with one byte and one descriptor."""

    _fields_ = (
        *(("name", ctypes.c_void_p), ("name_size", ctypes.c_uint32)),
        *(("parts", ctypes.c_void_p), ("part_count", ctypes.c_size_t)),
        *(("control", ctypes.c_void_p), ("control_size", ctypes.c_size_t), ("flags", ctypes.c_int)),
    )


_kept: list[Any] = []  # memory whose address the filter lets pass is used for nothing else


def _seccomp(libc: ctypes.CDLL, channel: socket.socket, allow: Collection[str]) -> bool:
    """Filter the system calls of this process; the listener goes to the supervisor. False: not possible."""
    if platform.machine() not in _MACHINES or sys.maxsize < 2**32:
        return False
    channel.sendall(b"?")
    if channel.recv(1) != b"y":
        return False
    byte = ctypes.create_string_buffer(b"l", 1)
    part = (ctypes.c_void_p * 2)(ctypes.addressof(byte), 1)
    control = ctypes.create_string_buffer(24)
    message = _Message(None, 0, ctypes.addressof(part), 1, ctypes.addressof(control), 24, 0)
    _kept.extend((byte, part, control, message))
    address = ctypes.addressof(message)
    code = b"".join(struct.pack("=HBBI", *each) for each in _filter(_rows(allow), address))
    program = _Program(len(code) // 8, code)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    libc.syscall.restype = ctypes.c_long
    number = _MACHINES[platform.machine()][2]
    flags = _NEW_LISTENER | _NO_SLOWER
    listener = libc.syscall(number, _SET_FILTER, ctypes.c_ulong(flags), ctypes.byref(program))
    if listener < 0:
        return False
    struct.pack_into("=QiiI", control, 0, 20, socket.SOL_SOCKET, socket.SCM_RIGHTS, listener)
    libc.sendmsg(channel.fileno(), ctypes.c_void_p(address), 0)
    os.close(listener)
    return True


def apply(scratch: str, allow: Collection[str], channel: socket.socket) -> tuple[str, ...]:
    """Restrict this process and all that it starts. Returns the protections that this machine lacks."""
    if "subprocesses" in allow:
        return ()
    if not sys.platform.startswith("linux"):
        return ("landlock", "seccomp")
    absent = os.environ.get(IMITATE, "").split()
    libc = ctypes.CDLL(None, use_errno=True)
    found = []
    if "landlock" not in absent and _landlock(libc, (scratch, "/dev", "/proc/self"), allow):
        found.append("landlock")
    if "seccomp" not in absent and _seccomp(libc, channel, allow):
        found.append("seccomp")
    return tuple(each for each in ("landlock", "seccomp") if each not in found)


def describe_missing(missing: Collection[str]) -> str:
    """One line. The filter also refuses what Landlock would."""
    if "seccomp" not in missing:
        return ""
    real = "sends, starts or signals, and modes of files that it sets,"
    if "landlock" in missing:
        real = "writes, sends, starts or signals"
    names = " and ".join(missing)
    return f"the kernel or the container has no {names}: what the program's native code {real} is real"


# The supervisor ---------------------------------------------------------------------------------------

_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101  # requests of ioctl
_QUESTION = struct.Struct("=QIIiIQ6Q")
_GO_ON = 1


class Supervisor:
    """Answers the questions of the filter, in the keeper."""

    def __init__(self, listener: int, scratch: str) -> None:
        self._listener, self._scratch = listener, scratch
        self._shared_before: set[int] = set()  # inodes of what others share
        self._answers = {number: row.answer for number, row in _rows(()) if callable(row.answer)}
        with contextlib.suppress(OSError):
            self._shared_before = {each.inode() for each in os.scandir(_SHARED_MEMORY)}
        self.own_names: set[bytes] = set()  # addresses of Unix sockets without a path

    def fileno(self) -> int:
        return self._listener

    def answer(self) -> None:
        question = bytearray(_QUESTION.size)
        try:
            fcntl.ioctl(self._listener, _RECEIVE, question)
        except OSError:  # the process has ended meanwhile
            return
        identity, pid, _, number, _, _, *arguments = _QUESTION.unpack(question)
        try:
            refused = self._answers[number](self, _Process(pid), tuple(arguments))
        except PermissionError:  # a process that hides its memory
            refused = errno.EPERM
        except OSError:  # an address that is not mapped, a descriptor that is closed: the kernel says so
            refused = 0
        except Exception:  # of ours
            refused = errno.EPERM
        flags = 0 if refused else _GO_ON
        with contextlib.suppress(OSError):  # a signal has ended the call
            fcntl.ioctl(self._listener, _ANSWER, struct.pack("=QqiI", identity, 0, -refused, flags))

    def is_in_scratch(self, path: str) -> bool:
        return path == self._scratch or path.startswith(self._scratch + "/")

    def is_own_socket(self, address: bytes) -> bool:
        """A Unix socket of the program: its paths are in the overlay, other names were bound by it."""
        if address[2:3] in (b"", b"\0"):
            return address in self.own_names
        path = os.fsdecode(address[2:].partition(b"\0")[0])
        return self.is_in_scratch(os.path.realpath(path))

    def may_change(self, path: str) -> bool:
        if path.startswith(_SHARED_MEMORY):
            with contextlib.suppress(OSError):
                return os.lstat(path).st_ino not in self._shared_before
            return True
        if path.startswith("/proc/"):
            process = path.split("/")[2]
            return process.isdigit() and is_own(int(process), os.getpid())
        return self.is_in_scratch(path) or re.fullmatch(_DEVICES, path) is not None

    def address_errno(self, address: bytes) -> int:
        family = int.from_bytes(address[:2], sys.byteorder)
        if family in (socket.AF_UNSPEC, getattr(socket, "AF_NETLINK", -1)):
            return 0
        if family == socket.AF_UNIX:
            return 0 if self.is_own_socket(address) else errno.ECONNREFUSED
        if family not in (socket.AF_INET, socket.AF_INET6):
            return _NO_NETWORK
        port = int.from_bytes(address[2:4], "big")
        host = address[4:8] if family == socket.AF_INET else address[8:24]
        scope = int.from_bytes(address[24:28], sys.byteorder)
        is_here = len(host) in (4, 16) and is_own_address(str(ipaddress.ip_address(host)), scope)
        return 0 if is_here and port != _DOMAIN_NAMES else _NO_NETWORK


_ANY_PORT = 9
_DOMAIN_NAMES = 53  # a port: what answers there asks other machines


def is_own_address(host: str, scope: int = 0) -> bool:
    """Whether packets to the address stay on this machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    if address.is_loopback or address.is_unspecified:
        return True
    if address.is_multicast:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    place = (str(address), _ANY_PORT, 0, scope)[: 2 if address.version == 4 else 4]
    with contextlib.suppress(OSError), Probe(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0].partition("%")[0]) == str(address)
    return False


class Probe(socket.socket):
    """Asks the kernel for a route."""
