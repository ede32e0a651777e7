# Look for: one graph launch per step from step 3, the graph's private pool in the memory timeline, bfloat16 products.
"""Train a small transformer language model with cudatool alone, until it knows a nursery rhyme; no autograd.

Attention is made of batched products and a softmax. Products are computed in bfloat16 (autocast), the parameters stay
in float32 (fused AdamW), and after three ordinary steps the whole step is one CUDA graph that is replayed.
"""

import sys

import numpy as np

import cudatool as ct
from cudatool import blas, ops, random
from cudatool.amp import autocast
from cudatool.optim import AdamW, clip_grad_norm_

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 4, 2, 32, 8
STEPS, RATE, DROPOUT = 150, 3e-3, 0.05

RHYME = [
    ("malt", "lay in"),
    ("rat", "ate"),
    ("cat", "killed"),
    ("dog", "worried"),
    ("cow with the crumpled horn", "tossed"),
    ("maiden all forlorn", "milked"),
]
text, tail = "", "the house that Jack built.\n"
for noun, verb in RHYME:
    text, tail = f"{text}This is {tail}", f"the {noun} that {verb} {tail}"
text += f"This is {tail}"
letters = sorted(set(text))
encoded = np.array([letters.index(letter) for letter in text])


class Linear:
    """``x @ weight.T + bias`` for rows x."""

    def __init__(self, inputs, outputs):
        self.weight = random.randn(outputs, inputs) * (0.5 / np.sqrt(inputs))
        self.bias = ct.zeros(outputs)
        self.parameters = [self.weight, self.bias]

    def forward(self, x):
        self.x = x
        return blas.linear(x, self.weight, self.bias)

    def backward(self, gradient):
        self.gradients = [blas.mm(gradient.T, self.x), ops.sum(gradient, 0)]
        return blas.mm(gradient, self.weight)


class LayerNorm:
    """Rows with mean 0 and variance 1, then scaled and shifted."""

    def __init__(self):
        self.parameters = [ct.ones(WIDTH), ct.zeros(WIDTH)]

    def forward(self, x):
        self.x = x
        y, self.mean, self.scale = ops.native_layer_norm(x, (WIDTH,), *self.parameters, 1e-5)
        return y

    def backward(self, gradient):
        gradient, *self.gradients = ops.native_layer_norm_backward(
            gradient, self.x, (WIDTH,), self.mean, self.scale, *self.parameters, (True, True, True)
        )
        return gradient


class Attention:
    """Each position attends to those before it, with several heads."""

    def __init__(self):
        self.project, self.out = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)
        self.hidden = ops.triu(ct.ones((CONTEXT, CONTEXT), bool), 1)
        self.layers = [self.project, self.out]

    def forward(self, x):
        size = WIDTH // HEADS
        heads = self.project.forward(x).reshape(-1, CONTEXT, 3, HEADS, size).transpose(2, 0, 3, 1, 4)
        self.query, self.key, self.value = heads.contiguous().reshape(3, -1, CONTEXT, size)
        scores = blas.bmm(self.query, self.key.transpose(0, 2, 1)) * size**-0.5
        self.weights = ops.softmax(ops.masked_fill(scores, self.hidden, -np.inf), -1)
        mixed = blas.bmm(self.weights, self.value)
        return self.out.forward(self._rows(mixed.reshape(1, -1, HEADS, CONTEXT, size)))

    def backward(self, gradient):
        size = WIDTH // HEADS
        mixed = self.out.backward(gradient).reshape(-1, CONTEXT, HEADS, size).transpose(0, 2, 1, 3)
        mixed = mixed.contiguous().reshape(-1, CONTEXT, size)
        value = blas.bmm(self.weights.transpose(0, 2, 1), mixed)
        weights = blas.bmm(mixed, self.value.transpose(0, 2, 1))
        # Where a score was masked its weight is 0, and so is its gradient.
        scores = ops.softmax_backward(weights, self.weights, -1) * size**-0.5
        query, key = blas.bmm(scores, self.key), blas.bmm(scores.transpose(0, 2, 1), self.query)
        return self.project.backward(self._rows(ops.stack([query, key, value]).reshape(3, -1, HEADS, CONTEXT, size)))

    def _rows(self, heads):
        """Return a row for each position: parts, then heads, side by side."""
        parts, batch = heads.shape[:2]
        return heads.transpose(1, 3, 0, 2, 4).contiguous().reshape(batch * CONTEXT, parts * WIDTH)


class Perceptron:
    """Two products with a GELU between them."""

    def __init__(self):
        self.up, self.down = Linear(WIDTH, 4 * WIDTH), Linear(4 * WIDTH, WIDTH)
        self.layers = [self.up, self.down]

    def forward(self, x):
        self.x = self.up.forward(x)
        return self.down.forward(ops.gelu(self.x))

    def backward(self, gradient):
        return self.up.backward(ops.gelu_backward(self.down.backward(gradient), self.x))


class Residual:
    """``x + dropout(inner(norm(x)))``"""

    def __init__(self, inner):
        self.norm, self.inner = LayerNorm(), inner
        self.layers = [self.norm, *inner.layers]

    def forward(self, x, *, training):
        y, self.mask = random.native_dropout(self.inner.forward(self.norm.forward(x)), DROPOUT, training)
        return x + y

    def backward(self, gradient):
        inner = random.native_dropout_backward(gradient, self.mask, 1 / (1 - DROPOUT))
        return gradient + self.norm.backward(self.inner.backward(inner))


class Transformer:
    """Letters in, a score for each possible next letter out."""

    def __init__(self):
        self.letters, self.places = random.randn(len(letters), WIDTH) * 0.1, random.randn(CONTEXT, WIDTH) * 0.1
        self.blocks = [Residual(kind()) for _ in range(LAYERS) for kind in (Attention, Perceptron)]
        self.norm, self.head = LayerNorm(), Linear(WIDTH, len(letters))
        self.layers = [layer for block in self.blocks for layer in block.layers] + [self.norm, self.head]
        self.parameters = [self.letters, self.places, *(p for layer in self.layers for p in layer.parameters)]

    def forward(self, tokens, *, training=True):
        self.tokens = tokens
        x = (ops.embedding(tokens, self.letters) + self.places).reshape(-1, WIDTH)
        for block in self.blocks:
            x = block.forward(x, training=training)
        return self.head.forward(self.norm.forward(x))

    def backward(self, gradient):
        """Return the gradients of the parameters."""
        gradient = self.norm.backward(self.head.backward(gradient))
        for block in reversed(self.blocks):
            gradient = block.backward(gradient)
        gradient = gradient.reshape(-1, CONTEXT, WIDTH)
        embeddings = ops.embedding_dense_backward(gradient, self.tokens, len(letters)), ops.sum(gradient, 0)
        gradients = [*embeddings, *(g for layer in self.layers for g in layer.gradients)]
        return [g.to(np.float32) for g in gradients]


class Training:
    """A model, its optimizer, and the arrays that a step reads."""

    def __init__(self):
        random.manual_seed(0)
        self.model = Transformer()
        self.optimizer = AdamW(self.model.parameters, lr=RATE, weight_decay=0.01)
        self.tokens, self.targets = ct.zeros((BATCH, CONTEXT), np.int64), ct.zeros(BATCH * CONTEXT, np.int64)

    def load(self, rng):
        """Fill `tokens` and `targets` with parts of the text."""
        starts = rng.integers(0, len(text) - CONTEXT, BATCH)
        windows = encoded[starts[:, None] + np.arange(CONTEXT + 1)]
        self.tokens.copy_(windows[:, :-1])
        self.targets.copy_(windows[:, 1:].ravel())

    def step(self):
        """Do one step with what is in `tokens` and `targets`, and return its loss."""
        with autocast(dtype=ct.bfloat16):
            scores = self.model.forward(self.tokens)
            loss = ops.cross_entropy(scores, self.targets)
            gradients = self.model.backward(ops.cross_entropy_backward(1.0, scores, self.targets))
        clip_grad_norm_(gradients, 1.0)
        self.optimizer.step(gradients)
        return loss

    def write(self, line, count):
        """Return `line`, continued by `count` letters."""
        for _ in range(count):
            window = np.array([[letters.index(letter) for letter in line[-CONTEXT:]]])
            with autocast(dtype=ct.bfloat16):
                scores = self.model.forward(ct.asarray(window), training=False)
            line += letters[int(scores[-1].get().astype(np.float32).argmax())]
        return line


def main():
    rng, side, graph, losses = np.random.default_rng(0), ct.Stream(), ct.CUDAGraph(), []
    training = Training()
    side.wait_stream(ct.current_stream())
    with ct.stream(side):
        for _ in range(3):
            training.load(rng)
            losses.append(float(training.step().get()))
        with ct.graph(graph, stream=side):
            loss = training.step()
        for step in range(3, STEPS):
            training.load(rng)
            with ct.range(f"step {step}"):
                graph.replay()
            losses.append(float(loss.get()))
            if step % 50 == 49:
                print(f"step {step + 1:3}  loss {losses[-1]:.3f}")
        print(training.write("This is the dog that worried the"[:CONTEXT], 48).replace("\n", " / "))
    if np.mean(losses[-10:]) > 0.5:
        sys.exit(f"the loss ended at {np.mean(losses[-10:]):.3f}, which is more than 0.5")


if __name__ == "__main__":
    main()
