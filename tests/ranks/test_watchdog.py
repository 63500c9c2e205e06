"""A rank that is gone, or stands still, is noticed; one that answers is not."""

from __future__ import annotations

import socket
from concurrent.futures import Future, TimeoutError

import pytest

from mlx_parallm.errors import DeviceLostError, RankLostError
from mlx_parallm.extras.ranks.joining import Peer
from mlx_parallm.extras.ranks.leader import Leader
from mlx_parallm.extras.ranks.operations import Stop
from mlx_parallm.extras.ranks.watchdog import Watchdog


def watch(end: socket.socket, patience: float) -> tuple[Watchdog, Future[str]]:
    lost: Future[str] = Future()
    watchdog = Watchdog(Peer(3, end, end), lost.set_result, patience)
    watchdog.start()
    return watchdog, lost


def test_a_rank_that_has_ended_is_lost_at_once() -> None:
    mine, its = socket.socketpair()
    with mine:
        _, lost = watch(mine, patience=60)
        its.close()
        assert lost.result(30).startswith("rank 3 is lost: its connection")


def test_a_rank_that_stands_still_is_lost() -> None:
    mine, its = socket.socketpair()
    with mine, its:
        _, lost = watch(mine, patience=0.1)
        assert lost.result(30) == "rank 3 is lost: it was not heard for 0.1 s"


def test_ranks_that_watch_each_other_are_not_lost() -> None:
    mine, its = socket.socketpair()
    with mine, its:
        (first, lost), (second, lost_too) = watch(mine, patience=60), watch(its, patience=60)
        with pytest.raises(TimeoutError):
            lost.result(0.05)
        first.stop()
        second.stop()
        assert not lost_too.done()


def test_an_operation_for_a_lost_rank_says_which() -> None:
    mine, its = socket.socketpair()
    its.close()
    with mine, pytest.raises(DeviceLostError, match="rank 3 is lost"):
        Leader([Peer(3, mine, mine)]).repeat(Stop())


def test_a_computation_that_fails_because_a_rank_has_ended_says_which() -> None:
    (mine, its), (my_other, its_other) = socket.socketpair(), socket.socketpair()
    with mine, my_other, its_other:
        its.close()
        leader = Leader([Peer(1, my_other, my_other), Peer(2, mine, mine)])
        with pytest.raises(RankLostError, match="rank 2 is lost"), leader.together("training"):
            raise RuntimeError("[ring] connection to a peer was lost")
