"""Central differences in float64: what every backward pass is held to, element by element.

D_h = (f(x + h) - f(x - h)) / 2h differs from the derivative g by

- truncation, h^2 f'''/6 to leading order. D_h - D_{h/2} is three quarters of that, so 4 |D_h - D_{h/2}|
  is three times the truncation, wherever h is small beside the scale on which f''' changes;
- rounding: each f is wrong by some units of u = 2^-53 of the terms it is summed from. For an error of
  8 units, the two together give 8 u F / h, F the larger sum of magnitudes.

f is the scalar sum of dy * y. Inputs are multiples of 2^-20, so that x + h and x - h are exact.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from refpar.nn.layer import At, Stream

H = 2.0**-14
U = 2.0**-53

Evaluation = tuple[float, float]
"""f, and the sum of the magnitudes of its terms."""


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return multiples of 2^-20 between -1 and 1."""
    return rng.integers(-(2**20), 2**20, size=shape, endpoint=True) * 2.0**-20


def at(batch: int, **fields) -> At:
    """Return an address for a batch of that many rows."""
    return At(**({"seed": 7, "step": 3, "rows": tuple(range(100, 100 + batch))} | fields))


def check(f: Callable[[], Evaluation], x: np.ndarray, g: np.ndarray, name: str) -> None:
    """Assert that ``g`` is the derivative of f by ``x``, which f reads and this moves in place."""
    assert g.shape == x.shape, f"gradient of {name} has shape {g.shape}, not {x.shape}"
    for index in np.ndindex(x.shape):
        here = x[index]
        values: dict[float, float] = {}
        largest = 0.0
        for move in (H, -H, H / 2, -H / 2):
            x[index] = here + move
            values[move], magnitude = f()
            largest = max(largest, magnitude)
        x[index] = here
        d = (values[H] - values[-H]) / (2 * H)
        d_half = (values[H / 2] - values[-H / 2]) / H
        bound = 4 * abs(d - d_half) + 8 * U * largest / H
        assert abs(d - g[index]) <= bound, (
            f"{name}{list(index)}: gradient {g[index]}, difference {d}, bound {bound:.2g}"
        )


def weighted(y: np.ndarray, dy: np.ndarray) -> Evaluation:
    """Return sum(dy * y). An element of y may itself be what is left of terms as large as 1, or as the largest."""
    return math.fsum((y * dy).ravel()), abs(dy).sum() * max(1, abs(y).max(initial=0))


def run(layer, params: Mapping[str, np.ndarray], x: np.ndarray, dy: np.ndarray, where: At):
    """Return y, the gradients (a name that is yielded twice is summed) and dx.

    All arrays are read-only meanwhile: what is handed to a layer is not its own to write to.
    """
    arrays = [x, dy, *params.values()]
    for array in arrays:
        array.flags.writeable = False
    y, saved = layer.forward(params, x, where)
    stream = Stream(layer.backward(params, saved, dy))
    gradients: dict[str, np.ndarray] = {}
    for name, gradient in stream:
        gradients[name] = gradients[name] + gradient if name in gradients else gradient
    for array in arrays:
        array.flags.writeable = True
    return y, gradients, stream.dx


def check_layer(layer, params: Mapping[str, np.ndarray], x: np.ndarray, dy: np.ndarray, where: At) -> None:
    """Assert that every gradient of ``layer`` agrees with central differences."""
    y, gradients, dx = run(layer, params, x, dy, where)
    assert y.shape == dy.shape
    assert set(gradients) == set(layer.specs) == set(params)

    def f() -> Evaluation:
        return weighted(layer.forward(params, x, where)[0], dy)

    for name, p in params.items():
        check(f, p, gradients[name], name)
    if x.dtype.kind == "f":
        check(f, x, dx, "x")
    else:
        assert dx is None


def draw_params(layer, rng: np.random.Generator, dtype=np.float64) -> dict[str, np.ndarray]:
    """Return values for all parameters of ``layer``: none zero by rule, so that no gradient vanishes by accident."""
    return {name: numbers(rng, *spec.shape).astype(dtype) for name, spec in layer.specs.items()}
