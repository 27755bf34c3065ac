"""Snapshots of training programs on paper: healthy ones, and ones with a mistake that ``memprof --from`` must name.

A program is a sequence of allocations with the stacks that Python would show. Nothing is computed and torch is not
imported, so that hundreds take seconds.
"""

import contextlib
import random

MIB = 2**20
TORCH = "/opt/venv/lib/python3.11/site-packages/torch"


def frame(filename, line, name):
    return {"filename": filename, "line": line, "name": name}


CALL = [frame(f"{TORCH}/nn/modules/module.py", line, name) for line, name in ((1751, "_call_impl"), (1739, "_wrapped"))]
LINEAR = [frame(f"{TORCH}/nn/modules/linear.py", 125, "forward"), *CALL]
MAIN = [frame("/home/u/run/train.py", 210, "main"), frame("/home/u/run/train.py", 260, "<module>")]
WRAPPER = [frame(f"{TORCH}/optim/optimizer.py", 485, "wrapper")]


def functional(name):
    return [frame(f"{TORCH}/nn/functional.py", 3000, name)]


def own(line, name, file="train"):
    return [frame(f"/home/u/run/{file}.py", line, name)]


class OutOfMemory(Exception):
    """An allocation failed."""


class Program:
    """A model, its training, and the allocator's record of it; each large block is a segment of its own."""

    def __init__(self, seed, capacity=10**15, has_stacks=True):
        self.draw = random.Random(seed)
        self.capacity, self.has_stacks = capacity, has_stacks
        self.trace, self.live, self.cached, self.segments = [], {}, {}, {}
        self.reserved, self.next_address, self.pool = 0, 0x7F0000000000, (0, 0)
        draw = self.draw
        self.layers = draw.choice((4, 5, 6, 8, 12, 24, 48))
        self.width = draw.choice((8, 16, 24)) * MIB
        self.activation = draw.choice((4, 12, 20)) * MIB
        self.logits = draw.choice((30, 70, 110)) * MIB
        # Whether layers run in a forward method of the model, or are called by the training step.
        self.has_model_frame = draw.random() < 0.6
        self.batch = 1.0
        self.annotations = []

    def allocate(self, size, frames=()):
        size = int(size)
        rounded = -(-size // 512) * 512
        addresses = self.cached.get((rounded, self.pool))
        if addresses:
            address = addresses.pop()
        else:
            if self.reserved + rounded > self.capacity:
                self._release(frames)
            if self.reserved + rounded > self.capacity:
                self._record("oom", self.capacity - self.reserved, rounded, frames)
                raise OutOfMemory
            address, self.next_address = self.next_address, self.next_address + rounded + 2 * MIB
            self.segments[address] = (rounded, self.pool)
            self.reserved += rounded
            self._record("segment_alloc", address, rounded, frames)
        self._record("alloc", address, size, frames)
        self.live[address] = size, frames
        return address

    def free(self, *addresses):
        for address in addresses:
            size, _ = self.live.pop(address)
            self._record("free_requested", address, size, ())
            self._record("free_completed", address, size, ())
            self.cached.setdefault(self.segments[address], []).append(address)

    def _release(self, frames):
        for (size, _), addresses in self.cached.items():
            for address in addresses:
                del self.segments[address]
                self.reserved -= size
                self._record("segment_free", address, size, frames)
            addresses.clear()

    def _record(self, action, address, size, frames):
        place = "device_free" if action == "oom" else "addr"
        self.trace.append({"action": action, place: address, "size": size, "stream": 0, "time_us": len(self.trace)})
        if self.has_stacks:
            self.trace[-1]["frames"] = frames

    def snapshot(self, last=None):
        """The snapshot, of a ring buffer of ``last`` entries."""
        segments = []
        for address, (size, pool) in sorted(self.segments.items()):
            requested, frames = self.live.get(address, (0, ()))
            block = {"address": address, "size": size, "requested_size": requested}
            block |= {"state": "active_allocated" if address in self.live else "inactive"}
            block |= {"frames": list(frames) if self.has_stacks else []}
            segments.append(
                {"device": 0, "address": address, "total_size": size, "stream": 0, "segment_pool_id": pool}
                | {"is_expandable": False, "blocks": [block]}
            )
        for entry in self.trace:
            entry["frames"] = list(entry.get("frames", ()))
        trace = self.trace[-last:] if last else self.trace
        return {"segments": segments, "device_traces": [trace], "external_annotations": self.annotations}

    # What programs do.

    def build(self, count=None):
        stack = [frame(f"{TORCH}/nn/modules/linear.py", 106, "__init__"), *own(20, "__init__", "model"), *MAIN]
        return [self.allocate(self.width, stack) for _ in range(count or self.layers + 1)]

    def in_model(self, line, *, layer, caller):
        """The frames around a call: of a layer, its own line in the model; of the head, another."""
        outer = [*own(75 if layer else 90, "forward", "model"), *CALL] if self.has_model_frame else []
        return [*own(line, "forward", "model"), *CALL, *outer, *caller, *MAIN]

    def forward(self, caller, *, keeps=True, half=False, loss=True, layers=None):
        """A forward pass; returns what lives until the backward pass, of which the last is the loss."""
        a, saved = self.activation * self.batch, []
        lines = ((40, LINEAR, 1), (52, LINEAR, self.up), (47, functional("scaled_dot_product_attention"), 1))
        lines += ((38, [frame(f"{TORCH}/nn/modules/normalization.py", 125, "forward"), *CALL], 1),)
        for _ in range(layers or self.layers):
            layer = [self.allocate(k * a, [*f, *self.in_model(n, layer=True, caller=caller)]) for n, f, k in lines]
            stack = [*functional("silu"), *self.in_model(55, layer=True, caller=caller)]
            self.free(self.allocate(a, stack))
            if keeps:
                saved += layer
            else:
                self.free(*layer)
        size = self.logits * self.batch / (2 if half else 1)
        saved.append(self.allocate(size, [*LINEAR, *self.in_model(90, layer=False, caller=caller)]))
        if not loss:
            return saved
        stack = [*functional("cross_entropy"), *own(119, "loss_fn"), *caller, *MAIN]
        for _ in range(2 if half else 1):
            saved.append(self.allocate(self.logits * self.batch, stack))
        saved.append(self.allocate(4, stack))
        return saved

    up = 4

    def backward(self, saved, gradients):
        """Free what was saved and make gradients, on a thread without a stack."""
        for index, address in enumerate(reversed(saved[:-1])):
            temporary = self.allocate(self.live[address][0])
            if index < self.layers + 1 and len(gradients) < self.layers + 1:
                gradients.append(self.allocate(self.width))
            self.free(address, temporary)

    def update(self, caller, parameters):
        stack = [frame(f"{TORCH}/optim/adamw.py", 700, "_multi_tensor_adamw"), *WRAPPER, *caller, *MAIN]
        self.free(*[self.allocate(self.width, stack) for _ in range(parameters)])

    def make_state(self, way, caller, count=None):
        """AdamW's two moments of each parameter, written in one of six ways."""
        count = count or self.layers + 1
        step = [frame(f"{TORCH}/optim/adamw.py", 230, "step"), *WRAPPER, *caller, *MAIN]
        custom = [frame("/home/u/run/optimizer.py", 31, "step"), *WRAPPER, *caller, *MAIN]
        lines = {
            "two lines": [[frame(f"{TORCH}/optim/adamw.py", line, "_init_group"), *step] for line in (410, 415)],
            "one line": [custom] * 2,
            "moment after moment": [custom] * 2,
            "load_state_dict": [[frame(f"{TORCH}/optim/optimizer.py", 900, "load_state_dict"), *caller, *MAIN]] * 2,
            "constructor": [[*own(12, "__init__", "optimizer"), *own(190, "build"), *MAIN]] * 2,
            "by hand": [[*own(140, "adamw_update"), *caller, *MAIN]] * 2,
        }[way]
        if way == "moment after moment":
            return [self.allocate(self.width, line) for line in lines for _ in range(count)]
        return [self.allocate(self.width, line) for _ in range(count) for line in lines]

    def train(self, steps, *, way="two lines", state=(), each=None, half=False, passes=1, updates=True):
        """Whole training steps, given the optimizer's state of earlier ones; ``each(step)`` runs at the end of each."""
        caller, gradients = own(120, "train_step"), []
        if way == "constructor":
            state = self.make_state(way, caller)
        for step in range(steps):
            tokens = self.allocate(64 * 1024 * self.batch, [*own(118, "train_step"), *MAIN])
            for _ in range(passes):
                saved = self.forward(caller, half=half)
                self.backward(saved, gradients)
                self.free(saved[-1])
            if not state:
                state = self.make_state(way, own(130, "train_step"))
            if updates:
                self.update(own(130, "train_step"), self.layers + 1)
            self.free(*gradients, tokens)
            gradients.clear()
            if each is not None:
                each(step)
        return state

    def fail(self, spare, then):
        """Run ``then`` with so much memory left."""
        self._release(())
        self.capacity = self.reserved + int(spare)
        try:
            then()
        except OutOfMemory:
            return
        raise AssertionError("nothing failed")


AT_STEP, AT_EVALUATION = own(120, "train_step"), own(150, "evaluate")
WAYS = ("two lines", "one line", "moment after moment", "load_state_dict", "constructor", "by hand")
KINDS = {}


def kind(cause=None):
    """Register a kind of program with the cause that may be named, None for a healthy one."""

    def register(function):
        KINDS[function.__name__] = (cause, function)
        return function

    return register


def too_large(p):
    """Fail in a step whose batch is not longer than others."""
    draw = p.draw.random()
    whole = p.layers * p.activation * (3 + p.up)
    p.fail((0.3 + 0.6 * draw) * whole, lambda: p.forward(AT_STEP))


@kind()
def first_step(p):
    p.build()
    whole = p.batch * (p.layers * p.activation * (3 + p.up) + 2 * p.logits)
    where = p.draw.choice((0.3, 0.6, 0.9, 0.98))
    p.fail(where * whole, lambda: p.backward(p.forward(AT_STEP), []))


@kind()
def twice_as_wide(p):
    p.up = p.draw.choice((1, 2, 4))
    p.build()
    p.logits = p.activation * p.draw.choice((1, 2, 4))
    p.train(p.draw.randint(1, 4), half=p.draw.random() < 0.3 and p.logits < 0.05 * p.activation * p.layers)
    too_large(p)


def adamw(way):
    def program(p):
        p.build()
        p.train(p.draw.randint(3, 7), way=way, updates=p.draw.random() < 0.7)
        if p.draw.random() < 0.5:
            too_large(p)

    program.__name__ = f"adamw_{way.replace(' ', '_')}"
    return kind()(program)


for _way in WAYS:
    adamw(_way)


@kind()
def ema(p):
    p.build()
    stack = [frame("/usr/lib/python3.11/copy.py", 153, "deepcopy"), *own(33, "start_ema"), *MAIN]
    state = p.train(p.draw.randint(2, 6))
    [p.allocate(p.width, stack) for _ in range(p.layers + 1)]
    p.train(3, state=state)
    too_large(p)


@kind()
def healthy_evaluation(p):
    p.build()
    if p.draw.random() < 0.6:
        p.train(p.draw.randint(2, 5))
    for _ in range(p.draw.randint(5, 9)):
        p.free(*p.forward(AT_EVALUATION, keeps=False))


@kind("graph kept")
def evaluation_keeps_graphs(p):
    p.build()
    if p.draw.random() < 0.6:
        p.train(p.draw.randint(1, 4))
    passes = p.layers * p.activation * (3 + p.up) + 2 * p.logits
    p.fail(p.draw.uniform(4.1, 8) * passes, lambda: [p.forward(AT_EVALUATION) for _ in range(12)])


@kind("leak")
def evaluation_keeps_outputs(p):
    p.build()
    if p.draw.random() < 0.6:
        p.train(p.draw.randint(1, 4))
    p.fail(
        p.draw.uniform(5, 9) * p.logits + 8 * p.activation,
        lambda: [p.forward(AT_EVALUATION, keeps=False, loss=False) for _ in range(12)],
    )


@kind("growing cache")
def growing_cache(p):
    p.build()
    cache = []

    def grow(step):
        stack = [*functional("cat"), *own(61, "forward", "model"), *CALL, *AT_STEP, *MAIN]
        cache.append(p.allocate((step + 1) * p.activation, stack))
        if len(cache) > 1:
            p.free(cache.pop(0))

    p.train(p.draw.randint(7, 20), each=grow)


@kind("growing cache")
def cache_that_grows_every_other_step(p):
    p.build()
    p.train(p.draw.randint(12, 20), each=keep_last(p, lambda step: step // 2 + 1))


@kind()
def last_output_of_batches_that_become_longer(p):
    p.build()

    def lengthen(step):
        p.batch = 1 + step / 10
        keep(step)

    keep = keep_last(p, lambda step: p.batch)
    p.train(p.draw.randint(7, 12), each=lengthen)


def keep_last(p, scale):
    """Keep one tensor of so many times the logits, made by one line of the model's, anew where its size changes."""
    kept = {}

    def keep(step):
        if kept and kept["scale"] == scale(step):
            return
        stack = [*LINEAR, *p.in_model(90, layer=False, caller=AT_STEP)]
        address = p.allocate(scale(step) * p.logits, stack)
        if kept:
            p.free(kept["address"])
        kept.update(address=address, scale=scale(step))

    return keep


@kind("growing cache")
def generation(p):
    p.build()
    caches = [None] * p.layers
    for token in range(p.draw.randint(8, 20)):
        for layer in range(p.layers):
            stack = p.in_model(61, layer=True, caller=own(170, "generate"))
            p.free(p.allocate(p.activation, [*LINEAR, *stack]))
            new = p.allocate((100 + token) * p.activation / 50, stack)
            if caches[layer] is not None:
                p.free(caches[layer])
            caches[layer] = new
        p.free(p.allocate(p.logits, [*LINEAR, *p.in_model(90, layer=False, caller=own(170, "generate"))]))


@kind()
def bounded_cache(p):
    p.build()
    cache, bound = [], p.draw.randint(3, 6)

    def keep(step):
        cache.append(p.allocate(p.activation, [*own(66, "remember"), *MAIN]))
        if len(cache) > bound:
            p.free(cache.pop(0))

    p.train(bound + p.draw.randint(4, 8), each=keep)


@kind("graph kept")
def list_of_losses(p):
    p.build()
    p.train(p.draw.randint(5, 8), each=lambda step: p.forward(own(144, "train_step")))


@kind("leak")
def list_of_outputs(p):
    p.build()
    stack = [*LINEAR, *p.in_model(90, layer=False, caller=AT_STEP)]
    p.train(p.draw.randint(5, 8), each=lambda step: p.allocate(p.logits, stack))
    if p.draw.random() < 0.5:
        too_large(p)


@kind()
def ddp_buckets(p):
    p.build()
    [p.allocate(25 * MIB, [frame(f"{TORCH}/nn/parallel/distributed.py", 860, "__init__"), *MAIN]) for _ in range(4)]

    def rebuild(step):
        if step == 0:
            stack = [frame(f"{TORCH}/nn/parallel/distributed.py", 1600, "_pre_forward"), *CALL, *AT_STEP, *MAIN]
            [p.allocate(25 * MIB, stack) for _ in range(4)]

    p.train(p.draw.randint(2, 6), each=rebuild)
    too_large(p)


@kind()
def accumulation(p):
    p.build()
    p.train(p.draw.randint(2, 5), passes=p.draw.choice((2, 4)))
    too_large(p)


@kind()
def private_pools(p):
    p.build()
    p.pool = (0, 1)
    saved = p.forward(AT_STEP)
    p.backward(saved, [])
    p.pool = (0, 0)
    p.train(3)


@kind()
def varying_lengths(p):
    p.build()

    def draw_length(step):
        p.batch = p.draw.choice((0.5, 0.75, 1.0, 1.25))

    p.train(p.draw.randint(5, 9), each=draw_length)


@kind("longer batch")
def longer_batch(p):
    p.build()
    p.train(p.draw.randint(2, 5))
    p.batch = p.draw.choice((1.5, 2.2, 3.0))
    too_large(p)


@kind("fragmentation")
def fragmentation(p):
    p.build()
    p.train(2)
    p._release(())
    pieces = [p.allocate(16 * MIB, [*own(66, "load"), *MAIN]) for _ in range(int(0.6 * p.reserved / MIB / 16))]
    p.free(*pieces[::2])
    # Segments that are cut cannot be given back.
    p._release = lambda frames: None
    p.capacity = p.reserved + 4 * MIB
    with contextlib.suppress(OutOfMemory):
        p.allocate(48 * MIB, [*own(67, "load"), *MAIN])


@kind("optimizer state twice")
def two_optimizers(p):
    p.build()
    way = p.draw.choice(WAYS[:3])
    p.train(p.draw.randint(1, 3), way=way)
    if p.draw.random() < 0.5:
        p.backward(p.forward(AT_STEP), kept := [])
        p.make_state(way, own(130, "train_step"))
        p.free(*kept)
        p.train(2, way=way)
    else:
        p.train(2, way=way)


@kind("fp32 logits")
def half_precision_logits(p):
    p.layers, p.logits = 4, p.activation * 60
    p.build()
    p.train(p.draw.randint(2, 4), half=True)
    if p.draw.random() < 0.5:
        whole = p.layers * p.activation * (3 + p.up) + p.logits / 2
        p.fail(whole + p.draw.choice((0.7, 1.5)) * p.logits, lambda: p.forward(AT_STEP, half=True))


@kind("leak")
def evaluation_every_fourth_step(p):
    p.build()
    stack = [*own(77, "validate"), *MAIN]
    p.train(4 * p.draw.randint(5, 6) + 3, each=lambda step: step % 4 == 3 and p.allocate(p.logits, stack))


@kind("leak")
def leak_without_stacks(p):
    p.has_stacks = False
    list_of_outputs(p)


@kind("leak")
def named_steps(p):
    """No optimizer and no backward pass: record_function names the steps."""
    p.build()
    for step in range(6):
        p.annotations.append({"name": f"step {step}", "stage": "START", "time_us": len(p.trace), "device": 0})
        kept = p.forward(AT_STEP, keeps=False, loss=False)
        p.annotations.append({"name": f"step {step}", "stage": "END", "time_us": len(p.trace), "device": 0})
        p.last_kept = kept


def program(name, seed):
    """The program of a kind."""
    result = Program(f"{name} {seed}")
    KINDS[name][1](result)
    return result
