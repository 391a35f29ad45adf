"""Each lane function: the compiled body and the Python body against NumPy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest

from blockadapt.kernels.cpu import simd
from blockadapt.kernels.cpu.simd import LANES, SQUARE

REALS = [np.float32, np.float64]
each_real = pytest.mark.parametrize("real", REALS, ids=["float32", "float64"])
Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _quiet_floating_point() -> Any:
    with np.errstate(all="ignore"):
        yield


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    return numba.njit(nogil=True, error_model="numpy")(function)  # type: ignore[no-any-return]


def both(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The function compiled and as Python."""
    return [jit(function), function]


def special(real: Any) -> Array:
    info = np.finfo(real)
    extremes = [info.max, info.tiny, info.smallest_subnormal, info.eps, 1.0, 2.0, 0.5, 3.0, 1e-20, 1e20, 0.0]
    values = [*extremes, *(-value for value in extremes), np.inf, -np.inf, np.nan]
    return np.array(values, dtype=real)


def rows(real: Any, count: int, seed: int = 0, among: Array | None = None) -> list[Array]:
    """Rows of lanes: random numbers of many magnitudes, mixed with special ones."""
    rng = np.random.default_rng(seed)
    L = LANES
    made = []
    for _ in range(count):
        row = (rng.standard_normal(L) * 10.0 ** rng.uniform(-12, 12, L)).astype(real)
        picks = rng.random(L) < 0.5
        row[picks] = rng.choice(special(real) if among is None else among, picks.sum())
        made.append(row)
    return made


@each_real
def test_a_row_has_32_lanes_of_either_type(real: Any) -> None:
    assert LANES == 32
    assert simd.broadcast(real(0)).size == 32


# ----------------------------------------------------------------------------------------------------------- arithmetic

# A function of two rows, written with the lane functions, and the truth in NumPy.
load, store = simd.load, simd.store
PAIRS: dict[str, tuple[Callable[..., Any], Callable[[Array, Array], Array]]] = {
    "add": (lambda out, a, b: store(out, 0, load(a, 0) + load(b, 0)), lambda a, b: a + b),
    "sub": (lambda out, a, b: store(out, 0, load(a, 0) - load(b, 0)), lambda a, b: a - b),
    "mul": (lambda out, a, b: store(out, 0, load(a, 0) * load(b, 0)), lambda a, b: a * b),
    "div": (lambda out, a, b: store(out, 0, load(a, 0) / load(b, 0)), lambda a, b: a / b),
    "neg": (lambda out, a, b: store(out, 0, -load(a, 0)), lambda a, b: -a),
    "absolute": (lambda out, a, b: store(out, 0, simd.absolute(load(a, 0))), lambda a, b: np.abs(a)),
    "sqrt": (lambda out, a, b: store(out, 0, simd.sqrt(load(a, 0))), lambda a, b: np.sqrt(a)),
    "maximum": (
        lambda out, a, b: store(out, 0, simd.maximum(load(a, 0), load(b, 0))),
        lambda a, b: np.where(np.isnan(a) | np.isnan(b), b, np.fmax(a, b)),
    ),
    "minimum": (
        lambda out, a, b: store(out, 0, simd.minimum(load(a, 0), load(b, 0))),
        lambda a, b: np.where(np.isnan(a) | np.isnan(b), b, np.fmin(a, b)),
    ),
    "select <": (
        lambda out, a, b: store(out, 0, simd.select(load(a, 0) < load(b, 0), load(a, 0), load(b, 0))),
        lambda a, b: np.where(a < b, a, b),
    ),
    "select <=": (
        lambda out, a, b: store(out, 0, simd.select(load(a, 0) <= load(b, 0), load(a, 0), -load(a, 0))),
        lambda a, b: np.where(a <= b, a, -a),
    ),
    "select ==": (
        lambda out, a, b: store(out, 0, simd.select(load(a, 0) == load(b, 0), load(a, 0), -load(b, 0))),
        lambda a, b: np.where(a == b, a, -b),
    ),
    "and": (
        lambda out, a, b: store(
            out, 0, simd.select((load(a, 0) < load(b, 0)) & (-load(a, 0) < load(b, 0)), load(a, 0), load(b, 0))
        ),
        lambda a, b: np.where((a < b) & (-a < b), a, b),
    ),
    "or": (
        lambda out, a, b: store(
            out, 0, simd.select((load(a, 0) < load(b, 0)) | (-load(a, 0) < load(b, 0)), load(a, 0), load(b, 0))
        ),
        lambda a, b: np.where((a < b) | (-a < b), a, b),
    ),
    "invert": (
        lambda out, a, b: store(out, 0, simd.select(~(load(a, 0) < load(b, 0)), load(a, 0), load(b, 0))),
        lambda a, b: np.where(~(a < b), a, b),
    ),
}


@each_real
@pytest.mark.parametrize("name", PAIRS)
def test_lane_operations_are_numpys_bit_for_bit(name: str, real: Any) -> None:
    function, truth = PAIRS[name]
    for run in both(function):
        for seed in range(4):
            a, b = rows(real, 2, seed)
            b[::5] = a[::5]
            out = np.empty_like(a)
            run(out, a, b)
            np.testing.assert_array_equal(out, truth(a, b))


NUMBERS: dict[str, tuple[Callable[..., Any], Callable[[Array], Array]]] = {
    "2.5 +": (lambda out, a: store(out, 0, 2.5 + load(a, 0)), lambda a: 2.5 + a),
    "− 3": (lambda out, a: store(out, 0, load(a, 0) - 3), lambda a: a - 3),
    "0.1 ·": (lambda out, a: store(out, 0, 0.1 * load(a, 0)), lambda a: 0.1 * a),
    "1 /": (lambda out, a: store(out, 0, 1 / load(a, 0)), lambda a: 1 / a),
    "/ 7": (lambda out, a: store(out, 0, load(a, 0) / 7), lambda a: a / 7),
}


@each_real
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_beside_a_row_counts_as_one_of_its_type(name: str, real: Any) -> None:
    function, truth = NUMBERS[name]
    for run in both(function):
        (a,) = rows(real, 1)
        out = np.empty_like(a)
        run(out, a)
        np.testing.assert_array_equal(out, truth(a))


@each_real
def test_fma_rounds_once_where_compiled_and_twice_at_most(real: Any) -> None:
    def fused(out: Any, a: Any, b: Any, c: Any) -> None:
        store(out, 0, simd.fma(load(a, 0), load(b, 0), load(c, 0)))

    rng = np.random.default_rng(0)
    L = LANES
    for _ in range(20):
        a, b = rng.standard_normal((2, L)).astype(real)
        c = -(a * b)  # the sum is what rounding the product lost
        once, twice = np.empty_like(a), np.empty_like(a)
        jit(fused)(once, a, b, c)
        fused(twice, a, b, c)
        exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
        if real is np.float32:
            np.testing.assert_array_equal(once, exact.astype(real))
        assert np.count_nonzero(once) > 0
        assert np.abs(once).max() <= np.finfo(real).eps * np.abs(c).max()
        np.testing.assert_array_equal(twice, np.zeros(L, real))


@each_real
def test_reciprocal_sqrt_is_within_two_units_in_the_last_place(real: Any) -> None:
    def inverse_root(out: Any, a: Any) -> None:
        store(out, 0, simd.reciprocal_sqrt(load(a, 0)))

    rng = np.random.default_rng(0)
    info = np.finfo(real)
    L = LANES
    for run in both(inverse_root):
        for _ in range(50):
            low, high = np.log2(info.tiny) + 1, np.log2(info.max) - 2
            a = np.exp2(rng.uniform(low, high, L)).astype(real)
            out = np.empty_like(a)
            run(out, a)
            exact = 1 / np.sqrt(a.astype(np.longdouble))
            assert (np.abs(out - exact) <= 2 * np.spacing(exact.astype(real)).astype(np.longdouble)).all()


@each_real
def test_power_of_two_is_the_largest_at_most_x(real: Any) -> None:
    def power(out: Any, a: Any) -> None:
        store(out, 0, simd.power_of_two(load(a, 0)))

    info = np.finfo(real)
    edges = [info.tiny, info.max, 1.0, np.nextafter(real(1), real(0)), 2.0, np.nextafter(real(2), real(3)), 3.0, 4.0]
    for run in both(power):
        for seed in range(4):
            (a,) = rows(real, 1, seed, among=np.array(edges, real))
            a = np.abs(a)
            out = np.empty_like(a)
            run(out, a)
            assert (out <= a).all()
            assert (a / out < 2).all()
            np.testing.assert_array_equal(np.frexp(out)[0], np.full_like(a, 0.5))


def wide(out: Any, a: Any) -> None:
    store(out, 0, simd.widen(load(a, 0)))


def narrow(out: Any, a: Any) -> None:
    store(out, 0, simd.narrow(load(a, 0), out))


def test_widen_is_exact_and_narrow_undoes_it() -> None:
    for widen, back in zip(both(wide), both(narrow), strict=True):
        for seed in range(4):
            (a,) = rows(np.float32, 1, seed)
            doubles, singles = np.empty(LANES), np.empty(LANES, np.float32)
            widen(doubles, a)
            np.testing.assert_array_equal(doubles, a.astype(np.float64))
            back(singles, doubles)
            np.testing.assert_array_equal(singles, a)


def test_narrow_rounds_to_nearest() -> None:
    a = np.random.default_rng(0).standard_normal(LANES) * 1e30
    a[:3] = [1e300, 1e-300, np.nan]
    for run in both(narrow):
        out = np.empty(LANES, np.float32)
        run(out, a)
        np.testing.assert_array_equal(out, a.astype(np.float32))


def test_prefetch_takes_any_address_and_changes_nothing() -> None:
    def ask(address: int) -> int:
        simd.prefetch(address)
        return address

    memory = np.arange(64.0)
    for run in both(ask):
        for address in (memory.ctypes.data, 0, -1, 2**62):
            assert run(address) == address
    np.testing.assert_array_equal(memory, np.arange(64.0))


@each_real
def test_broadcast_fills_every_lane(real: Any) -> None:
    def fill(out: Any, a: Any) -> None:
        store(out, 0, simd.broadcast(a[0]))

    for run in both(fill):
        for value in special(real):
            out = np.empty(LANES, real)
            run(out, np.array([value], real))
            np.testing.assert_array_equal(out, np.full_like(out, value))


@each_real
def test_all_lanes_is_true_only_if_all_are(real: Any) -> None:
    def all_below(a: Any, b: Any) -> bool:
        return simd.all_lanes(load(a, 0) < load(b, 0))

    L = LANES
    for run in both(all_below):
        assert run(np.zeros(L, real), np.ones(L, real))
        assert not run(np.ones(L, real), np.zeros(L, real))
        for lane in range(L):
            b = np.ones(L, real)
            b[lane] = np.nan if lane % 2 else -1
            assert not run(np.zeros(L, real), b)


# --------------------------------------------------------------------------------------------------------------- memory


@each_real
@pytest.mark.parametrize("start", [0, 1, 7, 32])
def test_load_and_store_touch_one_row_from_any_start(real: Any, start: int) -> None:
    def copy(out: Any, a: Any, start: int) -> None:
        store(out, start, load(a, start))

    L = LANES
    a = np.random.default_rng(0).standard_normal(L + 40).astype(real)
    for run in both(copy):
        out = np.zeros_like(a)
        run(out, a, start)
        expected = np.zeros_like(a)
        expected[start : start + L] = a[start : start + L]
        np.testing.assert_array_equal(out, expected)


def shuffled(real: Any, entries: int) -> tuple[Array, Array]:
    """Memory with a place of `entries` numbers for each lane, in random order, and their addresses."""
    rng = np.random.default_rng(0)
    size = np.dtype(real).itemsize
    L = LANES
    memory = rng.standard_normal((L + 2) * entries).astype(real)
    order = rng.permutation(L) + 1
    addresses = memory.ctypes.data + order * entries * size
    return memory, addresses.astype(np.int64)


def seen(memory: Array, addresses: Array, entry: int, entries: int) -> Array:
    """The places in `memory` of one entry of each lane."""
    first = (addresses - memory.ctypes.data) // memory.itemsize
    assert (first % entries == 0).all()
    return first + entry


@each_real
def test_gather_reads_and_scatter_writes_one_number_a_lane(real: Any) -> None:
    def get(out: Any, addresses: Any, offset: int) -> None:
        store(out, 0, simd.gather(addresses, offset, out))

    def put(a: Any, addresses: Any, offset: int) -> None:
        simd.scatter(addresses, offset, load(a, 0))

    for read, write in zip(both(get), both(put), strict=True):
        for entry in (0, 2):
            memory, addresses = shuffled(real, 3)
            places = seen(memory, addresses, entry, 3)
            out = np.empty(addresses.size, real)
            read(out, addresses, entry * memory.itemsize)
            np.testing.assert_array_equal(out, memory[places])
            (new,) = rows(real, 1)
            expected = memory.copy()
            expected[places] = new
            write(new, addresses, entry * memory.itemsize)
            np.testing.assert_array_equal(memory, expected)


@each_real
def test_load_row_and_store_row_move_what_lies_side_by_side(real: Any) -> None:
    def move(like: Any, source: int, target: int) -> None:
        simd.store_row(target, simd.load_row(source, like))

    L = LANES
    for run in both(move):
        for start in (0, 1, 5):
            source = np.random.default_rng(0).standard_normal(L + 8).astype(real)
            target = np.zeros(L + 8, real)
            run(source, source.ctypes.data + start * source.itemsize, target.ctypes.data + 3 * source.itemsize)
            expected = np.zeros_like(target)
            expected[3 : 3 + L] = source[start : start + L]
            np.testing.assert_array_equal(target, expected)


def inwards(addresses: Any, offset: int, array: Any, start: int) -> None:
    simd.transpose_in(addresses, offset, array, start)


def outwards(addresses: Any, offset: int, array: Any, start: int) -> None:
    simd.transpose_out(addresses, offset, array, start)


@each_real
@pytest.mark.parametrize(("offset", "start"), [(0, 0), (3, 0), (0, 5), (2, 64)])
def test_transpose_in_transposes_and_transpose_out_undoes_it(real: Any, offset: int, start: int) -> None:
    entries = 20
    for transpose_in, transpose_out in zip(both(inwards), both(outwards), strict=True):
        memory, addresses = shuffled(real, entries)
        L = addresses.size
        array = np.zeros(SQUARE * L + 80, real)
        transpose_in(addresses, offset * memory.itemsize, array, start)
        expected = np.zeros_like(array)
        for entry in range(SQUARE):
            row = memory[seen(memory, addresses, offset + entry, entries)]
            expected[start + entry * L : start + (entry + 1) * L] = row
        np.testing.assert_array_equal(array, expected)

        before = memory.copy()
        touched = np.concatenate([seen(memory, addresses, offset + entry, entries) for entry in range(SQUARE)])
        memory[touched] = np.nan
        transpose_out(addresses, offset * memory.itemsize, array, start)
        np.testing.assert_array_equal(memory, before)


def few_inwards(addresses: Any, count: int, array: Any) -> None:
    simd.transpose_few_in(addresses, count, array)


def few_outwards(addresses: Any, count: int, array: Any) -> None:
    simd.transpose_few_out(addresses, count, array)


@each_real
@pytest.mark.parametrize("count", [1, 2, 7, 10, 15])
def test_transposing_few_entries_touches_nothing_past_them(real: Any, count: int) -> None:
    for transpose_in, transpose_out in zip(both(few_inwards), both(few_outwards), strict=True):
        memory, addresses = shuffled(real, count)
        L = addresses.size
        array = np.full(SQUARE * L, np.nan, real)
        transpose_in(addresses, count, array)
        expected = np.full_like(array, np.nan)
        for entry in range(count):
            expected[entry * L : (entry + 1) * L] = memory[seen(memory, addresses, entry, count)]
        np.testing.assert_array_equal(array, expected)

        before = memory.copy()
        touched = np.concatenate([seen(memory, addresses, entry, count) for entry in range(count)])
        memory[touched] = np.nan
        transpose_out(addresses, count, array)
        np.testing.assert_array_equal(memory, before)


def onto(addresses: Any, offset: int, count: int, array: Any, scales: Any) -> None:
    simd.transpose_onto(addresses, offset, count, array, scales)


@each_real
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("count", [1, 7, 15, 16])
def test_transposing_onto_memory_scales_it_adds_and_touches_nothing_else(real: Any, offset: int, count: int) -> None:
    entries = offset + count
    for transpose_onto in both(onto):
        memory, addresses = shuffled(real, entries)
        before, L = memory.astype(np.longdouble), addresses.size
        rng = np.random.default_rng(count)
        array, scales = rng.standard_normal(SQUARE * L).astype(real), rng.standard_normal(L).astype(real)
        expected, sizes = before.copy(), np.zeros_like(before)
        for entry in range(count):
            at, row = seen(memory, addresses, offset + entry, entries), array[entry * L : (entry + 1) * L]
            expected[at] = scales * before[at] + row
            sizes[at] = np.abs(scales * before[at]) + np.abs(row)
        transpose_onto(addresses, offset * memory.itemsize, count, array, scales)
        assert (np.abs(memory - expected) <= np.finfo(real).eps * sizes).all()


def load_some(out: Any, address: int, first: int, last: int, others: Any) -> None:
    store(out, 0, simd.load_lanes(address, first, last, load(others, 0)))


def store_some(address: int, first: int, last: int, a: Any) -> None:
    simd.store_lanes(address, first, last, load(a, 0))


@each_real
@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 16), (5, 20), (16, 32), (31, 32), (0, 32), (7, 7)])
def test_a_part_of_a_row_touches_only_its_lanes(real: Any, first: int, last: int) -> None:
    others, numbers = np.arange(LANES, dtype=real), -1 - np.arange(LANES, dtype=real)
    expected = others.copy()
    expected[first:last] = numbers[first:last]
    for get, put in zip(both(load_some), both(store_some), strict=True):
        out = np.zeros(LANES, real)
        get(out, numbers.ctypes.data, first, last, others)
        np.testing.assert_array_equal(out, expected)
        memory = others.copy()
        put(memory.ctypes.data, first, last, numbers)
        np.testing.assert_array_equal(memory, expected)


def fill_rows(address: int, rows: int, like: Any) -> None:
    simd.rows_at(address, rows, like)[:] = like[0]


@each_real
def test_rows_at_an_address_are_the_memory_there(real: Any) -> None:
    for fill in both(fill_rows):
        memory = np.zeros(4 * LANES, real)
        fill(memory[LANES:].ctypes.data, 2, np.full(1, 7, real))
        np.testing.assert_array_equal(memory, np.repeat(np.array([0, 7, 7, 0], real), LANES))


# -------------------------------------------------------------------------------------------------------------- threads


def draw(tickets: Any, index: int, seen: Any, count: int) -> None:
    for _ in range(count):
        ticket = simd.take_ticket(tickets, index)
        seen[ticket] += 1


def test_take_ticket_counts_from_what_is_there() -> None:
    for run in both(draw):
        tickets, taken = np.array([5, 2, 9]), np.zeros(10, np.int64)
        run(tickets, 1, taken, 4)
        assert tickets.tolist() == [5, 6, 9]
        assert taken.tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]


def test_take_ticket_gives_each_ticket_to_one_thread_only() -> None:
    run = jit(draw)
    run(np.zeros(1, np.int64), 0, np.zeros(1, np.int64), 1)  # compile before the race
    each, count = 300_000, 2
    tickets, taken = np.zeros(1, np.int64), np.zeros(count * each, np.int64)
    ready = threading.Barrier(count)

    def race() -> None:
        ready.wait()
        run(tickets, 0, taken, each)

    threads = [threading.Thread(target=race) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tickets[0] == count * each
    assert (taken == 1).all()


def test_pointer_turns_an_address_into_what_carray_takes() -> None:
    def total(address: int) -> float:
        return numba.carray(simd.pointer(address), (4,), np.float64).sum()  # type: ignore[no-any-return]

    values = np.array([1.0, 2.0, 3.0, 4.0])
    for run in both(total):
        assert run(values.ctypes.data) == 10.0
