import threading

from thinwire.zero.memory import instances_of


class Wanted:
    pass


class Heir(Wanted):
    pass


class Proxy:
    """Pretends to be of another class, as mocks and lazy modules do, by code of its own."""

    @property
    def __class__(self):
        raise AssertionError("an object's own code has run")


def test_it_finds_instances_of_a_class_and_of_those_below_it() -> None:
    there = [Wanted(), Heir(), Proxy()]
    assert {id(one) for one in instances_of([Wanted])} == {id(there[0]), id(there[1])}
    assert instances_of([Heir]) == [there[1]]
    assert {id(one) for one in instances_of([Wanted, Proxy])} == set(map(id, there))
    assert instances_of([]) == []


def test_another_thread_may_fill_tuples_meanwhile() -> None:
    """CPython cannot resize a tuple that somebody else refers to, as a list of all objects does."""
    long_to_search = [[] for _ in range(300_000)]
    failures: list[BaseException] = []
    ended = threading.Event()

    def fill_tuples() -> None:
        try:
            while not ended.is_set():
                assert len(tuple(number for number in range(5000))) == 5000
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=fill_tuples) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        instances_of([Wanted])
    ended.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(long_to_search) == 300_000
