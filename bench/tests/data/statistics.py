"""Makes statistics.json: reference figures by numpy and scipy for the tests of src/statistics.rs."""

import json

import numpy as np
import scipy.stats

rng = np.random.default_rng(20260101)


def mser5(values):
    """MSER-5 straight from its definition, quadratic and plain."""
    batches = [np.mean(values[i : i + 5]) for i in range(0, len(values) // 5 * 5, 5)]
    best, cut = np.inf, 0
    for d in range(0, len(batches) // 2 + 1):
        rest = np.array(batches[d:])
        if len(rest) == 0:
            continue
        error = np.sum((rest - rest.mean()) ** 2) / len(rest) ** 2
        if error < best:
            best, cut = error, d
    return cut * 5


cases = []
for values in [
    [3.0],
    [2.0, 1.0],
    rng.normal(10, 2, 20).tolist(),
    rng.lognormal(1, 1, 700).tolist(),
]:
    cases.append(
        {
            "values": values,
            "quantiles": [[q, float(np.quantile(values, q))] for q in (0, 0.1, 0.5, 0.9, 0.99, 0.999, 1)],
            "mean": float(np.mean(values)),
            "deviation": float(np.std(values, ddof=1)) if len(values) > 1 else None,
        }
    )

ratios = []
for n, shift in [(5, 1.1), (20, 0.8), (200, 1.0)]:
    a = rng.normal(100, 5, n)
    b = a * shift + rng.normal(0, 1, n)
    for paired in (False, True):
        found = scipy.stats.bootstrap(
            (a, b),
            lambda x, y, axis: y.mean(axis=axis) / x.mean(axis=axis),
            paired=paired,
            vectorized=True,
            n_resamples=100_000,
            method="percentile",
            random_state=1,
        ).confidence_interval
        ratios.append(
            {
                "a": a.tolist(),
                "b": b.tolist(),
                "paired": paired,
                "estimate": float(b.mean() / a.mean()),
                "low": float(found.low),
                "high": float(found.high),
            }
        )

steady = []
for n, ramp in [(4, 0), (100, 0), (300, 60), (997, 200)]:
    values = rng.normal(50, 1, n)
    values[:ramp] += np.linspace(40, 0, ramp)
    steady.append({"values": values.tolist(), "from": int(mser5(values))})

with open("statistics.json", "w") as out:
    json.dump(
        {
            "made_with": f"numpy {np.__version__}, scipy {scipy.__version__}",
            "cases": cases,
            "ratios": ratios,
            "steady": steady,
        },
        out,
    )
