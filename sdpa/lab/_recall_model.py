"""A model of one layer of attention that recalls what it was just shown, its gradients, and Adam."""

from typing import NamedTuple

import numpy as np

import sdpa

from ._words import draw_matrix

# NumPy multiplies here, and its BLAS leaves threads that go on spinning after each product: with two threads of its
# own on two cores the library waits for them, and a step takes 13 ms instead of 0.9.  `sdpa._layer.linear.Linear` is
# for weights that stay: it lays them out once, and has no product for the gradient of a matrix.
THREADS = 1
ROOT_HALF = 0.5**0.5


class Parameters(NamedTuple):
    """The matrices of the model, or the gradients with respect to them."""

    name_table: np.ndarray  # (symbols, width): the embeddings of names
    thing_table: np.ndarray  # (symbols, width): those of things
    w_query: np.ndarray  # (width, width), as the next two
    w_key: np.ndarray
    w_value: np.ndarray
    w_out: np.ndarray  # (width, symbols): from all heads side by side to a logit for each thing


class Batch(NamedTuple):
    """Lists of pairs of a name and a thing.  No name is twice in a list.  Each name is a question, and its thing is the
    answer.  There are no positions, so the questions may have the order of the pairs."""

    names: np.ndarray  # (B, pairs, symbols): a one at the number of the name, as in the next one
    things: np.ndarray


class Result(NamedTuple):
    loss: float  # mean cross entropy, in nats
    accuracy: float  # share of the questions whose largest logit is that of the answer
    gradients: Parameters
    query: np.ndarray  # (B, heads, pairs, d_k)
    key: np.ndarray


def draw_parameters(random, symbols: int, width: int) -> Parameters:
    """Embeddings of variance 1, and matrices that keep it; float32."""
    tables = random.standard_normal((2, symbols, width), np.float32)
    return Parameters(*tables, *(draw_matrix(random, width, columns) for columns in (width, width, width, symbols)))


def draw_batch(random, batch: int, pairs: int, symbols: int) -> Batch:
    names = random.random((batch, symbols)).argsort(axis=1)[:, :pairs]
    things = random.integers(symbols, size=(batch, pairs))
    ones = np.eye(symbols, dtype=np.float32)
    return Batch(ones[names], ones[things])


def learn_from(parameters: Parameters, batch: Batch, heads: int, scale: float) -> Result:
    """The loss over a batch, and the gradients with respect to all parameters."""
    p, (names, things) = parameters, batch
    asked = names @ p.name_table
    shown = (asked + things @ p.thing_table) * ROOT_HALF  # of variance 1 again
    query, key, value = (split(x @ w, heads) for x, w in ((asked, p.w_query), (shown, p.w_key), (shown, p.w_value)))
    out, lse = sdpa.attention(query, key, value, scale=scale, return_lse=True, threads=THREADS)
    joined = join(out)
    loss, accuracy, by_logit = cross_entropy(joined @ p.w_out, things)

    by_out = split(by_logit @ p.w_out.T, heads)
    grads = sdpa.attention_backward(by_out, query, key, value, out, lse, scale=scale, threads=THREADS)
    by_query, by_key, by_value = (join(grad) for grad in grads[:3])
    by_shown = (by_key @ p.w_key.T + by_value @ p.w_value.T) * ROOT_HALF
    by_asked = by_query @ p.w_query.T + by_shown
    inputs = (names, by_asked), (things, by_shown), (asked, by_query), (shown, by_key), (shown, by_value)
    return Result(loss, accuracy, Parameters(*(by_matrix(x, y) for x, y in (*inputs, (joined, by_logit)))), query, key)


def split(x, heads):
    """(B, N, heads · d) to (B, heads, N, d)."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def join(x):
    """The way back."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def by_matrix(x, by_product):
    """dL/dW for a loss L that depends on y = x W: xᵀ times dL/dy, summed over all rows."""
    return x.reshape(-1, x.shape[-1]).T @ by_product.reshape(-1, by_product.shape[-1])


def cross_entropy(logits, answers):
    """Mean loss, accuracy, and the gradient of the loss with respect to the logits: (softmax - answers) / count."""
    logits = logits - logits.max(axis=-1, keepdims=True)
    totals = np.exp(logits).sum(axis=-1, keepdims=True)
    losses = np.log(totals[..., 0]) - (logits * answers).sum(axis=-1)
    right = logits.argmax(axis=-1) == answers.argmax(axis=-1)
    return losses.mean(), right.mean(), (np.exp(logits) / totals - answers) / losses.size


class Adam:
    """Adam (Kingma and Ba, 2015): each element moves by its mean gradient divided by the root of its mean square.  Both
    are exponential moving averages that start at 0, which the division by 1 - decay^t corrects."""

    MEAN, SQUARE, EPSILON = 0.9, 0.999, 1e-8

    def __init__(self, parameters, rate):
        self.parameters, self.rate, self.count = parameters, rate, 0
        self.means, self.squares = ([np.zeros_like(x) for x in parameters] for _ in range(2))

    def step(self, gradients):
        """Changes the parameters in place."""
        self.count += 1
        for x, grad, mean, square in zip(self.parameters, gradients, self.means, self.squares):
            mean += (1 - self.MEAN) * (grad - mean)
            square += (1 - self.SQUARE) * (grad**2 - square)
            root = np.sqrt(square / (1 - self.SQUARE**self.count)) + self.EPSILON
            x -= self.rate * (mean / (1 - self.MEAN**self.count)) / root
