"""The graphs without weights that the server ships are what the exporter makes, and do what they say."""

import numpy as np
import onnxruntime as ort
import pytest

from seq2seq_serve.bundle import names
from seq2seq_serve.export.graphs import weightless


def session(name: str) -> ort.InferenceSession:
    return ort.InferenceSession(weightless.FOLDER / f"{name}.onnx", providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def greedy() -> ort.InferenceSession:
    return session("greedy")


def test_the_committed_graphs_equal_those_that_the_exporter_makes(tmp_path, monkeypatch):
    committed = {path.name: path.read_bytes() for path in weightless.FOLDER.iterdir()}
    monkeypatch.setattr(weightless, "FOLDER", tmp_path / "new")
    weightless.main()
    made = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert made == committed, "run `make stubs`"


@pytest.mark.parametrize(("B", "V"), [(1, 5), (7, 300), (33, 4097)])
def test_greedy_takes_the_best_of_each_row(greedy, B, V):
    logits = np.random.default_rng(0).normal(size=(B, V)).astype(np.float32)
    [token_ids] = greedy.run(None, {"logits": logits})
    np.testing.assert_array_equal(token_ids[:, 0], logits.argmax(axis=1))


@pytest.mark.parametrize("V", [5, 300, 4097])
def test_of_equals_the_lowest_id_is_taken(greedy, V):
    rng = np.random.default_rng(1)
    logits = rng.integers(0, 3, (40, V)).astype(np.float32)
    logits[0] = 0
    [token_ids] = greedy.run(None, {"logits": logits})
    np.testing.assert_array_equal(token_ids[:, 0], logits.argmax(axis=1))


def test_move_copies_rows_over_others_and_reads_before_it_writes():
    rows = np.arange(20).reshape(5, 4)
    feeds = {"buffer": rows, "from_rows": np.array([4, 1]), "to_rows": np.array([[1], [0]])}
    [moved] = session("move").run(None, feeds)
    np.testing.assert_array_equal(moved, rows[[1, 4, 2, 3, 4]])


def test_suppressed_tokens_have_no_probability_and_other_logits_stay():
    logits = np.random.default_rng(0).normal(size=(3, 300)).astype(np.float32)
    never_ids = np.array([[7, 299]] * 3)
    [left] = session("suppress").run(None, {"logits": logits, "suppressed_ids": never_ids})
    assert np.isneginf(left[:, [7, 299]]).all()
    left[:, [7, 299]] = logits[:, [7, 299]]
    np.testing.assert_array_equal(left, logits)


BELOW_ONE = np.nextafter(1.0, 0.0)
SIZES = [(1, 5), (7, 128), (5, 129), (3, 300), (9, 4097)]


@pytest.fixture(scope="module")
def adjust() -> ort.InferenceSession:
    return session("adjust")


@pytest.fixture(scope="module")
def candidates() -> ort.InferenceSession:
    return session("candidates")


@pytest.fixture(scope="module", params=["sample", "sample_sorted", "sample_top_p"])
def draw(request) -> "Draw":
    return Draw(request.param)


@pytest.fixture(scope="module")
def draw_sorted() -> "Draw":
    return Draw("sample_sorted")


class Draw:
    """One of the graphs that draw, and what it is to do, in float64."""

    def __init__(self, name: str):
        self.session = session(name)
        self.is_sorted = name != "sample"
        self.has_top_k = name == "sample_sorted"
        self.is_covered = None

    def __call__(
        self, logits, uniforms, *, temperature=1.0, min_p=0.0, top_p=1.0, num_candidates=None, top_ks=None
    ):
        """Token ids and log-probabilities, `(m,)` each; a setting is one for all rows or one a row."""
        m, V = logits.shape
        feeds = {
            "logits": logits,
            "temperatures": column(temperature, m, np.float32),
            "min_ps": column(min_p, m, np.float32),
            "uniforms": column(uniforms, m, np.float64),
        }
        if self.is_sorted:
            feeds["num_candidates"] = np.array([num_candidates or V])
            feeds["top_ps"] = column(top_p, m, np.float32)
        if self.has_top_k:
            feeds["top_ks"] = np.full((m, 1), num_candidates or V) if top_ks is None else top_ks
        token_ids, log_probabilities, *self.is_covered = self.session.run(None, feeds)
        assert token_ids.shape == log_probabilities.shape == (m, 1)
        return token_ids[:, 0], log_probabilities[:, 0]

    def probabilities(self, row, temperature=1.0, min_p=0.0, top_p=1.0, num_candidates=None):
        """The ids of a row in the order of the draw, and the probability of each: `(n,)` each."""
        ids = np.argsort(-row, kind="stable")[:num_candidates] if self.is_sorted else np.arange(len(row))
        tempered = (row[ids].astype(np.float64) - row.max()) / np.float64(np.float32(temperature))
        p = np.exp(tempered) / np.exp(tempered).sum()
        kept = p >= np.float32(min_p) * p.max()
        if self.is_sorted:
            kept &= np.cumsum(p) - p < np.float32(top_p)
        return ids, np.where(kept, p, 0) / p[kept].sum()

    def check(self, token_id, row, uniform, **settings):
        """The token is the one of the inverse CDF, to a float32's rounding."""
        ids, p = self.probabilities(row, **settings)
        [[place]] = np.nonzero(ids == token_id)
        assert p[place] > 0
        sums = np.cumsum(p)
        assert sums[place] - p[place] - 2e-6 <= uniform <= sums[place] + 2e-6


def column(values, m, dtype):
    return np.broadcast_to(np.asarray(values, dtype).reshape(-1, 1), (m, 1)).copy()


def random_logits(rng, m, V, forbidden=0.0):
    logits = (3 * rng.normal(size=(m, V))).astype(np.float32)
    logits[rng.random((m, V)) < forbidden] = -np.inf
    logits[:, V // 2] = 1  # one remains
    return logits


def log_softmax(logits):
    logits = logits.astype(np.float64)
    best = logits.max(axis=1, keepdims=True)
    return logits - best - np.log(np.exp(logits - best).sum(axis=1, keepdims=True))


@pytest.mark.parametrize(("B", "V"), SIZES)
@pytest.mark.parametrize("A", [0, 1, 4])
def test_adjust_changes_the_given_logits_of_the_given_rows(adjust, B, V, A):
    rng = np.random.default_rng(2)
    logits = random_logits(rng, B, V, forbidden=0.1)
    rows = rng.integers(0, B, 6)
    adjusted_ids = np.stack([rng.permutation(V)[:A] for _ in rows])
    factors = rng.uniform(0.5, 2, (6, A)).astype(np.float32)
    biases = rng.normal(size=(6, A)).astype(np.float32)
    biases[:, 1:2] = -np.inf
    expected = logits[rows]
    for row, ids, row_factors, row_biases in zip(expected, adjusted_ids, factors, biases, strict=True):
        x = row[ids]
        row[ids] = np.where(x > 0, x / row_factors, x * row_factors) + row_biases
    feeds = {
        "logits": logits,
        "rows": rows,
        "adjusted_ids": adjusted_ids,
        "factors": factors,
        "biases": biases,
    }
    [out] = adjust.run(["logits_out"], feeds)
    assert out.tobytes() == expected.tobytes()


def test_factor_one_and_no_bias_keep_every_bit_and_an_id_may_stand_twice(adjust):
    row = np.array([[0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, -np.inf, 0.1, -0.1]], np.float32)
    ids = np.array([list(range(9)) * 2])
    ones, zeros = np.ones(ids.shape, np.float32), np.zeros(ids.shape, np.float32)
    feeds = {"logits": row, "rows": np.array([0]), "adjusted_ids": ids}
    for no_bias in (zeros, -zeros):
        [out] = adjust.run(None, feeds | {"factors": ones, "biases": no_bias})
        assert out.tobytes() == row.tobytes()
    row[np.abs(row) == np.float32(3e38)] = 1
    [out] = adjust.run(None, feeds | {"factors": 2 * ones, "biases": ones})
    expected = np.where(row > 0, row / np.float32(2), row * np.float32(2)) + np.float32(1)
    np.testing.assert_array_equal(out, expected)  # once, though each stands there twice


def test_penalties_are_subtracted_row_by_row_and_zero_keeps_every_bit():
    rng = np.random.default_rng(18)
    logits = random_logits(rng, 6, 300, forbidden=0.2)
    logits[0, :4] = [0.0, -0.0, 1e-45, -1e-45]
    penalties = np.zeros((4, 300), np.float32)
    penalties[1, :7], penalties[3, 5:9] = np.inf, rng.normal(size=4)
    rows = np.array([0, 1, 3, 3, 2, 1])
    feeds = {"logits": logits, "penalties": penalties, "penalty_rows": rows}
    [out] = session("penalize").run(None, feeds)
    np.testing.assert_array_equal(out, logits - penalties[rows])
    assert out[0].tobytes() == logits[0].tobytes()


def times(logits, *bounds):
    """Bounds are the first time, and what may follow: texts from an id on, and times between two ids."""
    last = logits.shape[1] - 1
    bounds = [(first, last, text, last, least, most) for first, text, least, most in bounds]
    columns = zip(*bounds, strict=True)
    feeds = {
        name: np.array(column)[:, None] for name, column in zip(names.TIME_COLUMNS, columns, strict=True)
    }
    [out] = session("times").run(None, {"logits": logits, **feeds})
    return out


def test_tokens_out_of_the_bounds_of_times_are_forbidden():
    rng = np.random.default_rng(20)
    V, first = 300, 250
    logits = random_logits(rng, 5, V, forbidden=0.2)
    logits[:, first:] -= 30  # no sum of times decides
    bounds = [
        (first, 0, 260, 270),
        (first, 40, 255, 299),
        (first, 0, V, 299),
        (V, 0, 0, 0),
        (first, 7, 250, 250),
    ]
    out = times(logits, *bounds)
    for row, (first_time, least_text, least_time, most_time) in enumerate(bounds):
        ids = np.arange(V)
        is_within = (least_time <= ids) & (ids <= most_time)
        is_allowed = np.where(ids >= first_time, is_within, ids >= least_text)
        np.testing.assert_array_equal(out[row], np.where(is_allowed, logits[row], -np.inf))


def test_times_that_are_together_more_probable_than_any_text_forbid_texts():
    logits = np.zeros((2, 10), np.float32)
    logits[:, 2] = np.log([3.9, 4.1])  # beside four times of 1
    out = times(logits, (5, 0, 6, 9), (5, 0, 6, 9))
    assert np.isneginf(out).sum(axis=1).tolist() == [6, 1]  # a row of times alone; one without the first time


def test_rows_without_times_keep_every_bit_beside_rows_with_times():
    rng = np.random.default_rng(21)
    logits = random_logits(rng, 6, 300, forbidden=0.2)
    logits[0, :4] = [0.0, 1e-45, -1e-45, 3e38]
    logits[1], logits[2, 1:] = -np.inf, -np.inf
    out = times(logits, *[(300, 0, 0, 0)] * 3, (250, 0, 255, 299), *[(300, 0, 0, 0)] * 2)
    for row in (0, 1, 2, 4, 5):
        assert out[row].tobytes() == logits[row].tobytes()


def test_forbidden_logits_never_become_nan():
    logits = np.full((4, 10), -np.inf, np.float32)
    logits[1, 7], logits[2, 2] = 1, 1
    out = times(logits, (5, 5, 5, 9), (5, 5, 5, 9), (5, 0, 10, 9), (5, 0, 5, 9))
    np.testing.assert_array_equal(out, logits)


def test_detect_takes_the_most_probable_of_the_given_tokens():
    rng = np.random.default_rng(22)
    logits = random_logits(rng, 9, 300)
    ids = np.array([7, 30, 31, 299])
    logits[0, ids] = 0  # of equals the first
    logits[1, ids[:3]] = -np.inf
    token_ids, log_probabilities = session("detect").run(
        ["token_ids", "log_probabilities"], {"logits": logits, "detected_ids": ids}
    )
    best = logits[:, ids].argmax(axis=1)
    np.testing.assert_array_equal(token_ids[:, 0], ids[best])
    expected = log_softmax(logits[:, ids])[np.arange(9), best]
    np.testing.assert_allclose(log_probabilities[:, 0], expected, rtol=1e-6, atol=1e-6)


def test_written_rows_take_the_place_of_others():
    buffer, values = np.zeros((4, 5), np.float32), np.ones((1, 5), np.float32)
    [out] = session("write").run(None, {"buffer": buffer, "to_rows": np.array([[2]]), "values": values})
    buffer[2] = 1
    np.testing.assert_array_equal(out, buffer)


@pytest.mark.parametrize(("m", "V"), SIZES)
def test_candidates_are_the_most_probable_of_equals_the_lowest_id(candidates, m, V):
    rng = np.random.default_rng(3)
    with_ties = rng.integers(0, 4, (m, V)).astype(np.float32)
    with_ties[0] = 0
    with_ties[1:, ::7] = -np.inf
    for logits in (random_logits(rng, m, V, forbidden=0.2), with_ties):
        order = np.argsort(-logits, axis=1, kind="stable")
        expected = np.take_along_axis(log_softmax(logits), order, axis=1)
        for K in sorted({1, 2, 5, min(V, 10), min(V, 50), V // 2, V - 1, V}):
            places = np.stack([rng.integers(0, m, 5), rng.integers(0, V, 5)], axis=1)
            feeds = {"logits": logits, "num_candidates": np.array([K]), "places": places}
            token_ids, log_probabilities, found = candidates.run(None, feeds)
            np.testing.assert_allclose(found, log_softmax(logits)[tuple(places.T)], rtol=1e-6, atol=1e-6)
            np.testing.assert_array_equal(token_ids, order[:, :K])
            np.testing.assert_allclose(log_probabilities, expected[:, :K], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("m", "V"), SIZES)
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7, "min_p": 0.02}, {"temperature": 3.0, "min_p": 0.1}]
)
def test_a_draw_is_the_inverse_of_the_cdf(draw, m, V, settings):
    rng = np.random.default_rng(4)
    for _ in range(4):
        logits, uniforms = random_logits(rng, m, V, forbidden=0.3), rng.random(m)
        token_ids, log_probabilities = draw(logits, uniforms, **settings)
        for token_id, row, uniform in zip(token_ids, logits, uniforms, strict=True):
            draw.check(token_id, row, uniform, **settings)
        expected = log_softmax(logits)[np.arange(m), token_ids]  # at temperature 1, of all tokens
        np.testing.assert_allclose(log_probabilities, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("m", "V"), SIZES)
@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_p": 0.5, "min_p": 0.1, "temperature": 1.5}, {}])
def test_a_sorted_draw_is_from_the_best_only(draw_sorted, m, V, settings):
    rng = np.random.default_rng(5)
    for K in (1, 3, V // 2, V):
        logits, uniforms = random_logits(rng, m, V, forbidden=0.3), rng.random(m)
        token_ids, log_probabilities = draw_sorted(logits, uniforms, num_candidates=K, **settings)
        for token_id, row, uniform in zip(token_ids, logits, uniforms, strict=True):
            draw_sorted.check(token_id, row, uniform, num_candidates=K, **settings)
        expected = log_softmax(logits)[np.arange(m), token_ids]
        np.testing.assert_allclose(log_probabilities, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [{"top_p": 0.5}, {"top_p": 0.999}, {"top_p": 0.9, "min_p": 0.05, "temperature": 1.5}]
)
def test_few_candidates_draw_what_all_do_bit_for_bit_where_they_cover_a_row(settings):
    rng = np.random.default_rng(19)
    draw, V = Draw("sample_top_p"), 4097
    for sharpness in (0.1, 1.0, 4.0):
        logits, uniforms = sharpness * random_logits(rng, 20, V, forbidden=0.3), rng.random(20)
        expected = np.stack(draw(logits, uniforms, **settings))
        for K in (1, 16, 256, V):
            drawn = np.stack(draw(logits, uniforms, num_candidates=K, **settings))
            [is_covered] = draw.is_covered
            num_remaining = [np.count_nonzero(draw.probabilities(row, **settings)[1]) for row in logits]
            np.testing.assert_array_equal(is_covered[:, 0], np.array(num_remaining) < K)
            is_covered |= K == V
            assert drawn[:, is_covered[:, 0]].tobytes() == expected[:, is_covered[:, 0]].tobytes()


@pytest.mark.parametrize("V", [5, 128, 129, 300, 4097])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_the_extremes_of_the_uniform_draw_the_first_and_the_last_of_those_that_remain(draw, V, min_p):
    rng = np.random.default_rng(7)
    logits = random_logits(rng, 50, V, forbidden=0.2)
    logits[:, [0, 1, -1]] = -np.inf
    logits[:25, : V // 2] = -np.inf  # whole blocks of none, before and after
    logits[25:, V // 2 + 1 :] = -np.inf
    for uniform, end in ((0.0, 0), (BELOW_ONE, -1)):
        token_ids, _ = draw(logits, uniform, min_p=min_p)
        expected = []
        for row in logits:
            ids, p = draw.probabilities(row, min_p=min_p)
            expected.append(ids[p > 0][end])
        np.testing.assert_array_equal(token_ids, expected)


def test_no_rounding_draws_what_is_forbidden_or_no_token(draw):
    rng = np.random.default_rng(8)
    m, V = 500, 300
    # probabilities of all sizes, many lost beside the sum of those before them
    logits = (-rng.uniform(0, 90, (m, V))).astype(np.float32)
    logits[rng.random((m, V)) < 0.5] = -np.inf
    logits[np.arange(m), rng.integers(0, V, m)] = 0
    nearly_one = np.minimum(1 - rng.random(m) * 1e-14, BELOW_ONE)
    for uniforms in (0.0, BELOW_ONE, nearly_one, rng.random(m) * 1e-30, rng.random(m)):
        token_ids, log_probabilities = draw(logits, uniforms)
        assert np.all((token_ids >= 0) & (token_ids < V))
        assert np.all(np.isfinite(logits[np.arange(m), token_ids]))
        assert np.all(np.isfinite(log_probabilities))


def test_no_rounding_between_the_two_stages_draws_beyond_the_block(draw):
    rng = np.random.default_rng(16)
    m, V = 2000, 256
    logits = np.full((m, V), -np.inf, np.float32)
    # a first block of about 2 ** -30 ends on half a unit of the sum, which is then rounded up by that half
    logits[:, 0] = rng.uniform(-20.7, -20.2, m)
    logits[:, 128] = 0
    logits[:, 129] = rng.uniform(-3, 0, m)
    token_ids, _ = draw(logits, BELOW_ONE)
    np.testing.assert_array_equal(token_ids, 0 if draw.is_sorted else 129)


def test_what_float32_holds_with_few_bits_is_not_drawn():
    row = np.array([[-np.inf, -95, -89, 0, -1]], np.float32)  # exp(-89) is below 2 ** -126
    token_ids, _ = Draw("sample")(row, 0.0)
    np.testing.assert_array_equal(token_ids, 3)


@pytest.mark.parametrize("V", [5, 300])
@pytest.mark.parametrize("broken", [-np.inf, np.nan, np.inf])
def test_a_row_without_probabilities_draws_some_token_and_leaves_the_others_alone(draw, V, broken):
    logits = random_logits(np.random.default_rng(15), 9, V)
    for columns in (slice(None), slice(-1, None)):
        with_broken = logits.copy()
        with_broken[4, : V - 1] = -np.inf
        with_broken[4, columns] = broken
        for uniform in (0.0, 0.5, BELOW_ONE):
            token_ids, _ = draw(with_broken, uniform)
            assert 0 <= token_ids[4] < V
            np.testing.assert_array_equal(np.delete(token_ids, 4), np.delete(draw(logits, uniform)[0], 4))


def test_a_cold_draw_is_the_best_token_and_a_hot_one_any_that_is_not_forbidden(draw):
    rng = np.random.default_rng(9)
    n, V = 1200, 300
    logits = random_logits(rng, n, V, forbidden=0.2)
    uniforms = (np.arange(n) + 0.5) / n
    for temperature in (1e-6, 1e-30, 1.2e-38):
        token_ids, _ = draw(logits, uniforms, temperature=temperature)
        np.testing.assert_array_equal(token_ids, logits.argmax(axis=1))
    same = np.repeat(logits[:1], n, axis=0)
    allowed = np.isfinite(same[0])
    for temperature in (1e9, 3e38):
        token_ids, _ = draw(same, uniforms, temperature=temperature)
        counts = np.bincount(token_ids, minlength=V)
        assert not counts[~allowed].any()
        assert np.all(abs(counts[allowed] - n / allowed.sum()) <= 1)


@pytest.mark.parametrize("settings", [{"min_p": 1.0}, {"min_p": 1.0, "temperature": 50.0}, {"min_p": 1.5}])
def test_min_p_one_keeps_the_best_and_its_equals(draw, settings):
    n = 400
    row = random_logits(np.random.default_rng(10), 1, 300)
    row[0, [7, 200]] = row.max() + 0.01
    token_ids, _ = draw(np.repeat(row, n, axis=0), np.arange(n) / n, **settings)
    np.testing.assert_array_equal(np.bincount(token_ids, minlength=300)[[7, 200]], [200, 200])


@pytest.mark.parametrize("top_p", [1e-45, 1e-6, 0.0])
def test_a_tiny_top_p_keeps_the_best_token(draw_sorted, top_p):
    logits = random_logits(np.random.default_rng(11), 40, 300)
    for uniform in (0.0, 0.5, BELOW_ONE):
        token_ids, _ = draw_sorted(logits, uniform, top_p=top_p)
        np.testing.assert_array_equal(token_ids, logits.argmax(axis=1))


@pytest.mark.parametrize("V", [5, 127, 128, 1001, 4097])
def test_a_row_is_drawn_the_same_alone_and_in_any_batch(draw, V):
    rng = np.random.default_rng(13)
    m = 33
    logits, uniforms = random_logits(rng, m, V, forbidden=0.1), rng.random(m)
    uniforms[:4] = [0, BELOW_ONE, 1e-9, 1 - 1e-9]
    settings = {
        "temperature": rng.uniform(0.3, 2, m),
        "min_p": rng.choice([0, 0.05], m),
        "top_p": rng.choice([0.5, 0.9, 1], m),
    }
    for num_candidates in (None, 3):
        token_ids, log_probabilities = draw(logits, uniforms, num_candidates=num_candidates, **settings)
        for i in range(m):
            own = {name: values[i] for name, values in settings.items()}
            alone = draw(logits[[i]], uniforms[i], num_candidates=num_candidates, **own)
            assert alone[0][0] == token_ids[i]
            assert alone[1].tobytes() == log_probabilities[[i]].tobytes()


@pytest.mark.parametrize("V", [5, 127, 1001, 4097])
def test_the_candidates_that_a_neighbour_asks_for_do_not_change_a_bit_of_a_draw(draw_sorted, V):
    rng = np.random.default_rng(17)
    m = 300
    logits, uniforms = random_logits(rng, m, V, forbidden=0.1), rng.random(m)
    uniforms[:9] = [0, BELOW_ONE, 1e-9, 1 - 1e-9, *np.nextafter(0.5, [0, 1]), 0.5, 0.25, 0.75]
    logits[:20] = rng.integers(0, 3, (20, V))  # with many equals
    own = rng.integers(1, min(V, 60) + 1, m)
    settings = {
        "temperature": rng.uniform(0.3, 2, m),
        "min_p": rng.choice([0, 0.05], m),
        "top_p": rng.choice([0.5, 0.9, 1], m),
    }
    alone = [
        draw_sorted(
            logits[[i]],
            uniforms[i],
            num_candidates=own[i],
            **{name: values[i] for name, values in settings.items()},
        )
        for i in range(m)
    ]
    for K in sorted({own.max(), min(64, V), min(256, V), V}):
        token_ids, log_probabilities = draw_sorted(
            logits, uniforms, num_candidates=K, top_ks=own[:, None], **settings
        )
        assert token_ids.tolist() == [token_id for ((token_id,), _) in alone]
        assert log_probabilities.tobytes() == b"".join(value.tobytes() for _, value in alone)


@pytest.mark.parametrize("V", [5, 1001, 4097])
def test_a_row_has_the_same_candidates_alone_and_in_any_batch(candidates, V):
    logits = random_logits(np.random.default_rng(14), 33, V, forbidden=0.1)
    feeds = {"num_candidates": np.array([4])}
    places = np.stack([np.arange(len(logits)), np.arange(len(logits)) * 3 % V], axis=1)
    together = candidates.run(None, feeds | {"logits": logits, "places": places})
    for i in range(len(logits)):
        alone = candidates.run(None, feeds | {"logits": logits[[i]], "places": places[[i]] * [0, 1]})
        for one, many in zip(alone, together, strict=True):
            assert one.tobytes() == many[i].tobytes()
