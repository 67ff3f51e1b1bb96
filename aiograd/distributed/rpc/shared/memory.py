"""Segments of shared memory, and handing one over to another process of the same user. Linux only; elsewhere there is none.

Note [Memory that a peer has a hand in]
    The receiver makes the ring, because it is the one that must be able to trust its size, and the sender checks the one that it is given: a file
    that can still be shortened would kill a process that touches it (SIGBUS). So its size must be sealed against change, which only files in memory
    can be, and its pages must be ordinary ones, since huge pages can run out. Neither side can undo a seal.

Note [Access]
    A segment has no name: the file descriptor is closed on both sides as soon as each has mapped it, so no other process can open it, nothing is left
    behind when a process is killed, and no descriptors are held. It passes over a Unix socket between processes of the same user, which the system
    vouches for on both ends, and to a process that has read the invitation, which only the authenticated peer can. Its content is not encrypted.
    Readers of it could also read the memory of the processes: the system's administrator, and debuggers of the same user.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import sys

from aiograd.distributed.rpc.shared.ring import NAME_BYTES, RING_FRAMES, TOKEN_BYTES

if sys.platform == "linux":
    import fcntl

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    IS_SUPPORTED = hasattr(os, "memfd_create")
else:
    _SEALS = 0
    IS_SUPPORTED = False

#: processes that may be connected to an invitation at a time; one of them is the peer
GUESTS = 4
#: pid, user and group, in the system's integers
_CREDENTIALS = struct.Struct("iII")


def ring_bytes(frame_bytes: int) -> int:
    """The size of a ring: whole pages, and room for a few of the longest frames of a connection."""
    return RING_FRAMES * frame_bytes + (-RING_FRAMES * frame_bytes % mmap.PAGESIZE)


def create(size: int) -> tuple[mmap.mmap, int]:
    """New shared memory, mapped, and its descriptor, which the caller closes.

    Raises:
        OSError: there are no descriptors or there is no memory left.
    """
    descriptor = os.memfd_create("aiograd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return mmap.mmap(descriptor, size), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def adopt(descriptor: int, size: int) -> mmap.mmap | None:
    """Map shared memory that another process has made; None unless it is safe to touch. See Note [Memory that a peer has a hand in].

    Args:
        descriptor: stays open.
        size: the size that it must have, in bytes.
    """
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            return None
        if os.fstat(descriptor).st_size != size or os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
            return None
        return mmap.mmap(descriptor, size)
    except OSError:  # no file in memory, or one that must not be written
        return None


def is_same_user(connection: socket.socket) -> bool:
    """True if the process at the other end of a Unix socket is one of this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def listen(name: bytes) -> socket.socket:
    """A Unix socket that waits for a process to hand over memory. Its name belongs to no file.

    Raises:
        OSError: there are no descriptors left.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        listener.bind(_address(name))
        listener.listen(GUESTS)
    except BaseException:
        listener.close()
        raise
    return listener


def hand_over(name: bytes, token: bytes, descriptor: int) -> bool:
    """Give a descriptor to the process that listens under `name`; False if no process does, or one of another user.

    Never blocks.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as connection:
            connection.connect(_address(name))
            if not is_same_user(connection):
                return False
            socket.send_fds(connection, [token], [descriptor])
            return True
    except OSError:
        return False


def receive(connection: socket.socket) -> tuple[bytes, int | None]:
    """The token and the descriptor that a process hands over; the caller closes the descriptor. None: there is none, or not exactly one.

    Raises:
        BlockingIOError: it has sent nothing yet.
        OSError: the connection is broken.
    """
    message, descriptors, _, _ = socket.recv_fds(connection, TOKEN_BYTES + 1, 2, socket.MSG_CMSG_CLOEXEC)
    if len(descriptors) == 1 and is_same_user(connection):
        return message, descriptors[0]
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    return b"", None


def _address(name: bytes) -> bytes:
    if len(name) != NAME_BYTES:
        raise ValueError(f"a name of {len(name)} bytes, expected {NAME_BYTES}")
    return b"\0aiograd-" + name.hex().encode()
