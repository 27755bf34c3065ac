"""The user's functions: imported, called, and what they raise told in a sentence that names their line."""

import contextlib
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from cs336sys.errors import CapabilityError, UsageError, UserCodeError, a_value, lines_of, summary_of
from cs336sys.run.cells import is_out_of_memory
from cs336sys.settings.course_package import PACKAGE, first_folder, line_in_package
from cs336sys.settings.sizes import ModelSize
from cs336sys.settings.training import Workload
from cs336sys.settings.user_code import is_file, is_user_code, named_object, source_file, split_reference
from cs336sys.training.user_models.attention import left_to_torch

# Folders of the user's files that were loaded: the first to have the course package, but the last on ``sys.path``.
user_folders: list[str] = []

_BUILD_CONTRACT = (
    f"it should take a size and return a torch.nn.Module; a size has {', '.join(ModelSize.__match_args__)}"
)

# Modules of the user's course package that were imported: what is imported later, while functions run, gets these.
_user_modules: dict[str, ModuleType] = {}


@contextlib.contextmanager
def their_course_package() -> Iterator[None]:
    """Let ``import cs336_basics`` within this find the one next to the user's file, or the first on ``sys.path``.

    Outside it finds ours again, which has the same name and with which this process has begun. If ours comes first,
    imports get the modules that are in use, not copies of them.
    """
    ours = _pop_course_modules()
    folder = first_folder(user_folders)
    # What was imported last time stays in use, unless a file loaded since then has brought a package that comes first.
    if folder is not None and PACKAGE in _user_modules and str(folder) in _user_modules[PACKAGE].__path__:
        sys.modules.update(_user_modules)
    finder = _CoursePackageFinder(ours)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        imported = _pop_course_modules()
        _user_modules.clear()
        _user_modules.update({name: module for name, module in imported.items() if module is not ours.get(name)})
        for name, module in _user_modules.items():
            # torch.compile looks modules up by the name that they give themselves.
            module.__name__ = f"user_code_{name}"
            sys.modules[module.__name__] = module
        sys.modules.update(ours)


def _pop_course_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
    return {name: sys.modules.pop(name) for name in names}


class _CoursePackageFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the user's course package; or the modules in ``ours`` where they come first, and loads them as they are."""

    def __init__(self, ours: dict[str, ModuleType]):
        self._our_modules = ours

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module of the first course package; if that is our own, the module in use. None for any other name."""
        if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
            return None
        if name == PACKAGE and (first := first_folder(user_folders)) is not None:
            path = [str(first.parent)]  # Folders of the user's files come before sys.path.
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None and name != PACKAGE:
            # An editable install would answer with a module of ours where their package lacks one.
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        our_module = self._our_modules.get(name)
        if spec is None or our_module is None or spec.origin is None or spec.origin != our_module.__file__:
            return spec
        # A second copy of our modules would have other classes than those in use. exec_module() restores the spec.
        is_package, original_spec = hasattr(our_module, "__path__"), our_module.__spec__
        return importlib.machinery.ModuleSpec(
            name, self, origin=spec.origin, loader_state=original_spec, is_package=is_package
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._our_modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which was executed before, its own spec back."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


_STDLIB = Path(sysconfig.get_path("stdlib"))
_PYTHONS_OWN = (_STDLIB, _STDLIB / "lib-dynload")  # The folders of Python's own modules.

# What has been loaded, and the packages and files that were imported with it, except installed ones and ours.
_loaded: dict[str, Callable[..., Any]] = {}
_user_packages: set[str] = set()


def load(reference: str) -> Callable[..., Any]:
    """Return the function, or class, that ``FILE.py:NAME`` or ``package.module:NAME`` names; import it once."""
    if (object_of_process := named_object(reference)) is not None:  # here:NAME, which is in no file.
        return object_of_process
    if reference in _loaded:
        return _loaded[reference]
    file = source_file(reference)
    source, name = split_reference(reference)
    modules_before = set(sys.modules)  # Of those imported since, copied_code() loads the user's anew.
    with _raising_user_code_errors([reference], f"{source} cannot be imported"), their_course_package():
        module = _import_file(file) if is_file(source) else importlib.import_module(source)
    imported = set(sys.modules) - modules_before
    _user_packages.update(module_name.partition(".")[0] for module_name in imported if _is_users(module_name))
    if not hasattr(module, name):
        public = [entry for entry, value in vars(module).items() if callable(value) and not entry.startswith("_")]
        raise UserCodeError(f"{source} has no {name}; it has {', '.join(public) or 'nothing to call'}")
    loaded_object = getattr(module, name)
    if not callable(loaded_object):
        raise UserCodeError(f"{source}: {name} is {a_value(loaded_object)}, and should be a function")
    _loaded[reference] = loaded_object
    return loaded_object


def _is_users(name: str) -> bool:
    """Return whether a module is the user's: neither installed nor ours."""
    file = getattr(sys.modules[name], "__file__", None) or ""
    installed = sysconfig.get_paths()
    return (
        bool(file)
        and name.partition(".")[0] not in ("cs336sys", PACKAGE)
        and not any(file.startswith(installed[kind] + os.sep) for kind in ("stdlib", "purelib", "platlib"))
        and f"{os.sep}site-packages{os.sep}" not in file
    )


@contextlib.contextmanager
def copied_code() -> Iterator[None]:
    """Load the user's code, a course package of theirs too, anew within this, and forget it afterwards.

    For models on the meta device, or of fake tensors: a module that keeps a table of rotations for all models, for one,
    would go on with a table that holds nothing.
    """
    names = [name for name in sys.modules if name.partition(".")[0] in _user_packages and _is_users(name)]
    modules = {name: sys.modules.pop(name) for name in names}
    modules_before = set(sys.modules)
    try:
        with mock.patch.dict(_loaded, clear=True), mock.patch.dict(_user_modules, clear=True):
            yield
    finally:
        for name in set(sys.modules) - modules_before:
            if _is_users(name):
                del sys.modules[name]
        sys.modules.update(modules)
        sys.modules.update({module.__name__: module for module in _user_modules.values()})  # torch.compile needs them.


def _import_file(file: Path) -> ModuleType:
    """Import a file as Python runs a program: files next to it come before packages that are installed.

    Once it is imported its folder comes last, so that a file there stands in for nothing that this program, or a rank
    that it starts with the same path, imports later. It never comes before Python's own modules.
    """
    folder = str(file.resolve().parent)
    if folder not in user_folders:
        user_folders.insert(0, folder)
    # Under a name that no module of anybody's has; classes and pickles look their module up.
    name = f"user_code_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    if getattr(sys.modules.get(name), "__file__", None) == spec.origin:
        # Classes of two functions of one file must be the same, as pickles look them up by their module.
        return sys.modules[name]
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    python_entries = [number for number, entry in enumerate(sys.path) if Path(entry) in _PYTHONS_OWN]
    position = python_entries[-1] + 1 if python_entries else 0
    precedes_python = folder in sys.path[:position]  # PYTHONPATH may have it, for example.
    if not precedes_python:
        sys.path.insert(position, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        if not precedes_python and folder in sys.path:
            sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
    return module


def build(reference: str, size: ModelSize) -> nn.Module:
    """Build the user's model of a size, on the present default device, ready to be trained."""
    function = load(reference)
    try:
        with _raising_user_code_errors([reference], f"{reference} failed"), their_course_package():
            # A module that the caller has built is copied, so that training leaves it as it is.
            model = copy.deepcopy(function) if isinstance(function, nn.Module) else function(size)
    except UserCodeError as error:
        if isinstance(error.__cause__, AttributeError | TypeError):
            raise UserCodeError(f"{error}; {_BUILD_CONTRACT}") from error.__cause__
        raise
    if not isinstance(model, nn.Module):
        raise UserCodeError(f"{reference} returned {a_value(model)}: {_BUILD_CONTRACT}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserCodeError(f"{reference} returned {a_value(model)} without parameters to train")
    return model.train()


def make_user_batch(reference: str, size: ModelSize, seed: int, device: torch.device) -> tuple[Any, Any]:
    """Make the user's inputs and targets of a seed."""
    function = load(reference)
    with _raising_user_code_errors([reference], f"{reference} failed"):
        batch = function(size, torch.Generator(device).manual_seed(seed), device)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UserCodeError(f"{reference} returned {a_value(batch)}: it should return (inputs, targets)")
    for tensor in torch.utils._pytree.tree_leaves(tuple(batch)):
        if isinstance(tensor, Tensor) and (tensor.dim() == 0 or len(tensor) != size.batch_size):
            raise UserCodeError(
                f"{reference} returned a tensor of shape {tuple(tensor.shape)}: the batch should come first, "
                f"{size.batch_size} long"
            )
    return batch[0], batch[1]


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call the model: entries of a dictionary become arguments by name, those of a tuple or list by position."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def token_logits(output: Any, targets: Tensor, reference: str, vocab_size: int) -> Tensor:
    """Return the logits, (batch, context, vocabulary), in what a model of tokens returned.

    Logits are the output itself, its ``.logits``, or the first of a tuple, such as nanoGPT's (logits, loss).
    """
    logits = getattr(output, "logits", output[0] if isinstance(output, tuple) and output else output)
    if not isinstance(logits, Tensor):
        raise UserCodeError(
            f"{reference}: its model returned {a_value(output)}: it should return logits, (logits, ...) or something "
            "with .logits; or give --loss"
        )
    # Some pad the vocabulary.
    if logits.shape[:-1] != targets.shape or logits.shape[-1] < vocab_size:
        remedy = "or give --loss"
        if logits.shape[1:2] == (1,):
            # nanoGPT computes the last logits alone where it is given no targets.
            remedy = (
                "if it takes targets, as nanoGPT's does, def forward(self, tokens): return super().forward(tokens, "
                f"tokens)[0] in a subclass, {remedy}"
            )
        expected = f"{(*targets.shape, vocab_size)} (batch, context, vocabulary)"
        raise UserCodeError(
            f"{reference}: its model returned logits of shape {tuple(logits.shape)}, and {expected} was expected; "
            f"{remedy}"
        )
    return logits


def scalar_loss(loss: Any, reference: str, *, with_gradients: bool) -> Tensor:
    """Return the loss, if it is one: a floating scalar that depends on parameters."""
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else a_value(loss)
        raise UserCodeError(f"{reference} returned {shape}: a loss is one number, the mean over the batch")
    if with_gradients and not loss.requires_grad:
        raise UserCodeError(f"{reference}: the loss depends on no parameter, so there is no backward pass")
    return loss


def references_of(workload: Workload) -> list[str]:
    """List the user's functions that a workload names, the model first."""
    user = workload.user
    named = [user.model, user.loss, user.batch, workload.optimizer if is_user_code(workload.optimizer) else None]
    return [reference for reference in named if reference is not None]


@contextlib.contextmanager
def telling_user_errors(workload: Workload) -> Iterator[None]:
    """Tell what a workload's own code raises in one sentence with its line, and what cs336_basics raises.

    What this program says itself or raises elsewhere, and that memory has run out, goes through.
    """
    references = references_of(workload)
    left_to_torch.clear()  # A cell begins here: it does not report the calls that an earlier cell left to torch.
    with _raising_user_code_errors(references, f"{references[0]} failed" if references else None):
        yield


def telling_errors_of(reference: str) -> AbstractContextManager[None]:
    """Tell errors as :func:`telling_user_errors`, of one function."""
    return _raising_user_code_errors([reference], f"{reference} failed")


@contextlib.contextmanager
def _raising_user_code_errors(references: list[str], failed: str | None) -> Iterator[None]:
    """Turn errors into UserCodeErrors with their line or else ``failed``; if None, those of ``cs336_basics`` alone."""
    try:
        yield
    except (UsageError, CapabilityError, UserCodeError):
        raise
    except (Exception, SystemExit) as error:  # Code that ends its process would end the sweep with it.
        in_package = line_in_package(error, user_folders)
        if is_out_of_memory(error) or (failed is None and in_package is None):  # Out of memory is a status of its own.
            raise
        line = innermost_line(lines_of(error), [source_file(reference) for reference in references], in_package)
        place = line or failed
        if _is_raised_by_kernels(error):
            place = f"our kernels failed, called from {line or references[0]}"  # Without references there is a line.
        message = f"{place}: {summary_of(error)}"
        if "modified by an inplace operation" in message:
            # In the backward pass no line of the user's runs.
            message = f"{place}: the backward pass needs a tensor that was changed in place"
            message += "; doctor --model names the line" if references else ""
        raise UserCodeError(message) from error


def innermost_line(
    lines: Sequence[tuple[Path, int]], files: list[Path], in_package: tuple[Path, Path, int] | None = None
) -> str:
    """Return the innermost of these lines that is in one of the files or next to it, ``mine.py, line 12``, or nothing.

    Args:
        in_package: the folder of ``cs336_basics``, and a file and line in it that count, too.
    """
    folders = tuple(str(file.resolve().parent) + os.sep for file in files)
    # Packages below what folders share do not count: files may lie next to an environment, or in this project's clone.
    installed = f"{os.sep}site-packages{os.sep}", f"{os.sep}cs336sys{os.sep}"
    for file, line in reversed(lines):  # The innermost stand last.
        if in_package is not None and (file, line) == in_package[1:]:  # Behind the folder.
            return f"{PACKAGE}/{file.relative_to(in_package[0])}, line {line}"
        if above := [folder for folder in folders if str(file).startswith(folder)]:
            below = str(file)[len(max(above, key=len)) - len(os.sep) :]
            if not any(folder in below for folder in installed):
                return f"{file.name}, line {line}"
    return ""


def _is_raised_by_kernels(error: BaseException) -> bool:
    """Return whether our kernels raised an error, or torch or Triton when our kernels called them."""
    files = (file for file, _ in reversed(lines_of(error)))
    innermost = next((file for file in files if not {"torch", "triton"} & set(file.parts)), None)
    return innermost is not None and innermost.is_relative_to(Path(__file__).parents[2] / "kernels")


def make_optimizer(reference: str, parameters: Iterable[Tensor], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Make the user's optimizer; ``settings`` are changed in each of its groups, where groups have them."""
    function = load(reference)
    with telling_errors_of(reference):
        optimizer = function(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserCodeError(f"{reference} returned {a_value(optimizer)}: it should return a torch.optim.Optimizer")
    for group in optimizer.param_groups:
        group.update(overriding_settings(group, settings))
    return optimizer


def overriding_settings(defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that replace an optimizer's own: all that it has, if it is like AdamW, else none."""
    # For AdamW: without eps, lr scales something else than a bounded step; Adafactor's eps are two other numbers.
    if not isinstance(defaults.get("eps"), int | float):
        return {}
    return {name: value for name, value in settings.items() if name in defaults}


def optimizer_class(reference: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of what the user's function makes, and its settings, to make one of some of the parameters."""
    # A matrix and a vector, because functions often put matrices and all else into two groups.
    parameters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    optimizer = make_optimizer(reference, parameters, settings={})
    setting_names = inspect.signature(type(optimizer)).parameters
    settings = [
        {name: value for name, value in group.items() if name in setting_names and name != "params"}
        for group in optimizer.param_groups
    ]
    if any(group != settings[0] for group in settings):
        raise CapabilityError(
            f"{reference} gives matrices and vectors different settings, which a sharded optimizer does not receive: "
            f"give all parameters the same settings, or choose strategy fsdp"
        )
    return type(optimizer), settings[0]
