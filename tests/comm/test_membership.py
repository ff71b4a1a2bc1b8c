"""Who is in an elastic job: workers as threads at a store of their process."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from tests.refusing import refused
from thinwire.comm import CommunicationError, Elastic, MembershipError, elastic, threads
from thinwire.comm.elastic import LimitedStore, check_launcher, meeting_place, reach, serve
from thinwire.comm.membership import Generation, Heart, Membership

SETTINGS = Elastic(workers=2, timeout=30.0, join_timeout=30.0, silence=5.0)


def arrive(store: HashStore, settings: Elastic = SETTINGS) -> Membership:
    return Membership(settings, store, "here")


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result(60) for one in [pool.submit(call) for call in calls]]


def begin(store: HashStore, count: int = 2) -> list[Membership]:
    """So many workers in generation 1, in its order."""
    settings = replace(SETTINGS, workers=count)
    workers = [arrive(store, settings) for _ in range(count)]
    at_once(*(lambda one=one: one.meet(None, alarm=False) for one in workers))
    return sorted(workers, key=lambda one: index(one))


def index(worker: Membership) -> int:
    assert worker.generation is not None
    return worker.generation.index


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_survivors_agree_and_keep_their_order_and_who_waits_comes_in_after_them() -> None:
    store = HashStore()
    first, second, third = begin(store, 3)
    comer = arrive(store)
    waiting = ThreadPoolExecutor(1).submit(lambda: comer.meet(None, alarm=False))
    until(lambda: third.wanted)
    assert not third.why_meet("")  # nobody is called for one who only waits
    second.leave()
    until(lambda: first.why_meet(""))
    found: list[Generation] = at_once(
        lambda: third.meet({"taken": 5}, alarm=True), lambda: first.meet({"taken": 4}, alarm=True)
    )
    found.append(waiting.result(60))
    assert [one.names for one in found] == [[first.name, third.name, comer.name]] * 3
    assert [one.index for one in found] == [1, 0, 2]
    assert first.departures == [f"{second.name} left"]
    assert [entry.record for entry in found[0].entries] == [{"taken": 4}, {"taken": 5}, None]
    assert not first.why_meet("")
    for one in (first, third, comer):
        one.leave()


def test_a_worker_that_is_silent_is_dropped_and_comes_back_as_a_new_one() -> None:
    store = HashStore()
    settings = replace(SETTINGS, silence=2.0)
    first, second = workers = [arrive(store, settings) for _ in range(2)]
    at_once(*(lambda one=one: one.meet(None, alarm=False) for one in workers))
    second.heart.stop()
    until(lambda: "no sign of life" in first.why_meet(""))
    assert first.meet({"taken": 1}, alarm=True).names == [first.name]
    assert first.departures == [f"{second.name} gave no sign of life for 2 s"]
    # It was only held up: what it says of its state does not count any more.
    second.heart = Heart(PrefixStore("thinwire/job", store), second.name, settings.silence)
    until(lambda: not first.heart.fate(second.name))
    with ThreadPoolExecutor(1) as pool:
        back = pool.submit(lambda: second.meet({"taken": 9}, alarm=True))
        until(lambda: first.wanted)
        found = first.meet({"taken": 2}, alarm=False)
        assert back.result(60).number == found.number == 3
    assert [entry.record for entry in found.entries] == [{"taken": 2}, None]
    for one in workers:
        one.leave()


def test_a_death_while_connecting_ends_in_an_error_not_in_a_wait() -> None:
    first, second = begin(HashStore())
    second.leave()
    start = time.monotonic()
    refused(CommunicationError, "did not connect", first.connect, [0, 1], "exchange")
    assert time.monotonic() - start < 25  # Gloo alone would wait for its timeout
    first.leave()


def test_workers_meet_once_the_meeting_place_answers_their_hearts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "_INTERVAL", 0.05)
    stopped, look = threading.Event(), Heart._look

    def late(heart: Heart) -> None:
        while stopped.is_set():
            time.sleep(0.01)
        look(heart)

    monkeypatch.setattr(Heart, "_look", late)
    first, second = begin(HashStore())
    first.heart._silence = second.heart._silence = 0.3
    stopped.set()
    until(lambda: "does not answer" in first.why_meet(""))
    threading.Timer(0.5, stopped.clear).start()
    at_once(*(lambda one=one: one.meet({}, alarm=True) for one in (first, second)))
    assert not first.why_meet("")
    at_once(*(lambda one=one: one.connect([0, 1], "exchange").comm.barrier() for one in (first, second)))
    for one in (first, second):
        one.leave()


def test_who_looks_on_does_not_wait_for_tellers_that_have_ended() -> None:
    store = HashStore()
    workers = begin(store)
    workers[0].begin()
    newcomer = arrive(store)

    def tell_and_end() -> None:
        until(lambda: all(one.heart.watched for one in workers))
        workers[0].heart.tell()
        workers[0]._store.write("onlooker/0/size", "3")
        for one in workers:
            one.leave()

    start = time.monotonic()
    at_once(tell_and_end, lambda: refused(CommunicationError, "did not connect: .* left", newcomer.look_on))
    assert time.monotonic() - start < 25  # Gloo alone would wait for its timeout
    newcomer.leave()


def test_all_are_done_or_meet_again() -> None:
    store = HashStore()
    first, second = begin(store)
    second.leave()
    assert not first.finish(3)
    assert first.meet({}, alarm=True).names == [first.name]
    assert first.finish(3)
    refused(MembershipError, "is over: there is nothing to join", arrive(store).meet, None, alarm=False)
    first.leave()
    late = arrive(store)
    late.heart.watch([first.name])
    until(lambda: late.heart.fate(first.name) != "")  # before it asks whether the job is over
    refused(MembershipError, "is over: there is nothing to join", late.meet, None, alarm=False)


def test_a_job_without_survivors_is_not_begun_anew() -> None:
    store = HashStore()
    for one in begin(store):
        one.leave()
    refused(MembershipError, "none of the 2 last workers of job 'job' is left", arrive(store).meet, None, alarm=False)


def test_too_few_do_not_begin_and_do_not_go_on() -> None:
    hurried = replace(SETTINGS, workers=3, min_workers=2, join_timeout=0.2)
    with pytest.raises(MembershipError, match="1 workers have met within 0 s; the job has min_workers=2"):
        arrive(HashStore(), hurried).meet(None, alarm=False)
    store = HashStore()
    first, second = (arrive(store, hurried) for _ in range(2))
    at_once(lambda: first.meet(None, alarm=False), lambda: second.meet(None, alarm=False))
    second.leave()
    until(lambda: first.why_meet(""))
    refused(MembershipError, "min_workers=2", first.meet, {}, alarm=True)


def test_a_lost_meeting_place_is_an_error_that_says_so() -> None:
    release = threading.Event()

    class Lost:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("connection reset")

        def check(self, keys: list[str]) -> bool:
            return release.wait(30)

    store: Any = Lost()
    limited = LimitedStore(store, "host0:29400", 0.05)
    refused(MembershipError, r"host0:29400 does not answer.*: connection reset", limited.add, "key", 1)
    refused(MembershipError, r"does not answer.* for 0.05 s", limited.read, "key")
    release.set()


def test_workers_meet_in_a_file_or_at_a_served_place_and_at_none_that_nobody_serves(tmp_path: Path) -> None:
    address = "127.0.0.1:29517"
    place = serve(address)
    for settings in (Elastic(workers=1, address=address), Elastic(workers=1, address=f"file:{tmp_path}/meeting")):
        worker = Membership(settings, *reach(settings), threads.single(30.0))
        assert worker.meet(None, alarm=False).index == 0
        claims = worker.claims
        assert [claims.claim(5), claims.claim(2), claims.claim(1)] == [0, 5, 7]
        assert worker.finish(0)
    del place
    refused(MembershipError, "cannot be written", reach, Elastic(workers=1, address=f"file:{tmp_path}/no/meeting"))
    other = tmp_path / "notes"
    other.write_text("garbage")
    refused(MembershipError, "holds something else", reach, Elastic(workers=1, address=f"file:{other}"))
    assert other.read_text() == "garbage"
    refused(ValueError, "served by none: start the workers with file:/x", serve, "file:/x")
    with pytest.raises(MembershipError, match=r"no meeting place is served at 127.0.0.1:1: start `python -m"):
        reach(Elastic(workers=1, address="127.0.0.1:1", join_timeout=0.1, timeout=30.0))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"workers": 0}, "workers must be a whole number of at least 1, got 0"),
        ({"workers": True}, "got True"),
        ({"workers": 2, "min_workers": 3}, "min_workers=3 is more than workers=2"),
        ({"workers": 2, "silence": 1.0}, "silence must be from 2 seconds up"),
        ({"workers": 2, "silence": 400.0}, "up to timeout=300"),
        ({"workers": 2, "timeout": 0.0}, "timeout"),
        ({"workers": 2, "join_timeout": "1"}, "join_timeout must be a positive number of seconds, got '1'"),
        ({"workers": 2, "silence": None}, "silence must be a positive number of seconds, got None"),
        ({"workers": 2, "job": ""}, "job must be a name"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, Any], error: str) -> None:
    refused(ValueError, error, Elastic, **options)


def test_where_workers_meet_and_launchers_that_would_end_the_survivors() -> None:
    assert meeting_place(SETTINGS, {"THINWIRE_MEETING": "host0:29400"}) == ("host0", 29400)
    assert meeting_place(Elastic(workers=1, address="::1:5"), {"THINWIRE_MEETING": "host0:29400"}) == ("::1", 5)
    assert meeting_place(SETTINGS, {"THINWIRE_MEETING": "file:/shared/a:b"}) == ("/shared/a:b", 0)
    for wrong in ("host0", "host0:", ":5", "host0:70000", "host0:x"):
        refused(ValueError, "must be HOST:PORT", meeting_place, SETTINGS, {"THINWIRE_MEETING": wrong})
    refused(ValueError, "no meeting place of elastic workers is given", meeting_place, SETTINGS, {})
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    refused(ValueError, "2 agents in one rendezvous and --max-restarts restarts every worker", check_launcher, torchrun)
    check_launcher(torchrun | {"TORCHELASTIC_MAX_RESTARTS": "0"})
    check_launcher(torchrun | {"GROUP_WORLD_SIZE": "1"})
    refused(ValueError, "mpirun ends the whole job", check_launcher, {"OMPI_COMM_WORLD_SIZE": "2"})
