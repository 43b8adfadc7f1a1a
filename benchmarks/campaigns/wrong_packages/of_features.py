"""Mistakes in the feature that ``new-plugin`` writes."""

from __future__ import annotations

from typing import Final

from .mistake import Change, Mistake

_WATCH: Final = """        layer.register_forward_hook(self._measure)
        return layer
"""
_NO_LISTENER: Final = """    @hookimpl
    def ascend_metrics(self)"""
_FEATURE: Final = "fresh-feature"


def _listener(body: str) -> Change:
    """A listener more."""
    return Change(
        _NO_LISTENER,
        f"    @hookimpl\n    def ascend_before_run(self) -> None:\n{body}\n{_NO_LISTENER}",
    )


MISTAKES: Final = (
    Mistake(
        name="torch-at-top-level",
        what="imports its work, and torch with it, at the top of the module",
        package=_FEATURE,
        changes=(
            Change(
                "if TYPE_CHECKING:\n    from torch import nn\n\n    from .sizes import LayerSizes",
                "from .sizes import LayerSizes\n\nif TYPE_CHECKING:\n    from torch import nn",
            ),
        ),
        checks=("KIT-IMPORT",),
        says="imports numpy, torch; move it into the hook",
    ),
    Mistake(
        name="option-without-bound",
        what="an option accepts 0, by which it divides",
        package=_FEATURE,
        changes=(
            Change(
                "attrs.field(default=1, validator=attrs.validators.ge(1))",
                "1",
            ),
        ),
        checks=("KIT-BOUNDS",),
        says="every accepts any number",
    ),
    Mistake(
        name="bound-that-is-too-low",
        what="an option accepts 0, by which it divides",
        package=_FEATURE,
        changes=(Change("attrs.validators.ge(1)", "attrs.validators.ge(0)"),),
        checks=("KIT-BOUNDS",),
        says="every=0 is accepted, but a run with it fails: ",
    ),
    Mistake(
        name="options-that-change",
        what="its options are not frozen",
        package=_FEATURE,
        changes=(Change("@attrs.frozen(kw_only=True)", "@attrs.define(kw_only=True)"),),
        checks=("KIT-OPTIONS",),
        says="can be changed after it is made; use attrs.frozen",
    ),
    Mistake(
        name="option-not-on-the-page",
        what="an option that came later is not on the page",
        package=_FEATURE,
        changes=(
            Change(
                '1 measures all. Unit: layers."""\n',
                '1 measures all. Unit: layers."""\n'
                "    digits: int = attrs.field(default=6, validator=attrs.validators.ge(1))\n"
                '    """How many digits to log."""\n',
            ),
        ),
        checks=("KIT-DOCS",),
        says="does not name the option 'digits'",
    ),
    Mistake(
        name="numerics-left-out",
        what="relies on the default of numerics",
        package=_FEATURE,
        changes=(Change("        numerics=Numerics.BITWISE,\n", ""),),
        checks=("KIT-MANIFEST",),
        says="'numerics' is not explicit in the Manifest",
    ),
    Mistake(
        name="summary-of-another-release",
        what="changes the summary in one of its two places",
        package=_FEATURE,
        changes=(Change('summary="log the size of what', 'summary="log the norm of what'),),
        checks=("KIT-LOAD",),
        says="summary",
    ),
    Mistake(
        name="misspelt-argument",
        what="calls a hook's argument as Megatron does",
        package=_FEATURE,
        changes=(
            Change("role: str, layer_index: int", "role: str, layer_number: int"),
            Change("layer_index % self", "layer_number % self"),
        ),
        checks=("KIT-HOOKS",),
        says="layer_number",
    ),
    Mistake(
        name="hook-without-mark",
        what="forgets @hookimpl of a listener",
        package=_FEATURE,
        changes=(
            Change(
                _NO_LISTENER,
                "    def ascend_after_run(self) -> None:\n        self._sizes = None\n\n"
                + _NO_LISTENER,
            ),
        ),
        checks=("KIT-LISTENERS",),
        says="ascend_after_run is never called",
    ),
    Mistake(
        name="state-of-the-class",
        what="keeps its state in the class",
        package=_FEATURE,
        changes=(
            Change(
                "    config_class = ", "    readings: dict[str, float] = {}\n    config_class = "
            ),
        ),
        checks=("KIT-STATE",),
        says="the class attribute 'readings' is a dict, which all instances share",
    ),
    Mistake(
        name="input-changed-in-place",
        what="squares a layer's output in place: float() of float32 makes no copy",
        package=_FEATURE,
        changes=(Change(".float().square()", ".float().square_()", "sizes.py"),),
        checks=("KIT-PARITY",),
        says="after 5 steps, against one rank without it: ",
    ),
    Mistake(
        name="state-dict-keys-changed",
        what="wraps the layer in a module instead of adding a hook",
        package=_FEATURE,
        changes=(
            Change(
                _WATCH,
                "        return _Watched(layer, self._measure)\n",
                "sizes.py",
            ),
            Change(
                "def root_mean_square",
                "class _Watched(nn.Module):\n"
                "    def __init__(self, inner: nn.Module, measure: Any) -> None:\n"
                "        super().__init__()\n"
                "        self.inner, self.measure = inner, measure\n\n"
                "    def forward(self, *arguments: Any, **named: Any) -> Any:\n"
                "        output = self.inner(*arguments, **named)\n"
                "        self.measure(self.inner, arguments, output)\n"
                "        return output\n\n\n"
                "def root_mean_square",
                "sizes.py",
            ),
        ),
        checks=("KIT-PARITY",),
        says="a wrapper changed the parameter names of ",
    ),
    Mistake(
        name="draws-of-the-run",
        what="measures random positions, drawn from the generator of dropout",
        package=_FEATURE,
        changes=(
            Change(
                "hidden_SBH = output[0] if isinstance(output, tuple) else output\n",
                "hidden_SBH = output[0] if isinstance(output, tuple) else output\n"
                "            hidden_SBH = hidden_SBH[torch.randperm(len(hidden_SBH))[:8]]\n",
                "sizes.py",
            ),
        ),
        checks=("KIT-DRAWS",),
        says="it draws from the generator ",
    ),
    Mistake(
        name="thread-left-behind",
        what="starts a thread that it does not end",
        package=_FEATURE,
        changes=(
            _listener(
                "        import threading\n\n"
                "        threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
            ),
        ),
        checks=("KIT-UNDO",),
        says="it does not restore: the threads",
    ),
    Mistake(
        name="environment-changed",
        what="sets a variable for a library and leaves it",
        package=_FEATURE,
        changes=(
            _listener('        import os\n\n        os.environ["NCCL_DEBUG_OF_SIZES"] = "WARN"\n'),
        ),
        checks=("KIT-UNDO",),
        says="it does not restore: the environment variable NCCL_DEBUG_OF_SIZES",
    ),
    Mistake(
        name="layers-kept-alive",
        what="keeps what it measured by layer in its module, beyond the run",
        package=_FEATURE,
        changes=(
            Change(
                "class LayerSizes:",
                "_LATEST: dict[nn.Module, Tensor] = {}\n\n\nclass LayerSizes:",
                "sizes.py",
            ),
            Change(
                "self._latest: dict[nn.Module, Tensor] = {}", "self._latest = _LATEST", "sizes.py"
            ),
        ),
        checks=("KIT-UNDO",),
        says="the number of parameters in memory",
    ),
    Mistake(
        name="undeclared-patch",
        what="replaces a method of Megatron instead of using a link",
        package=_FEATURE,
        changes=(
            Change(
                _WATCH,
                "        from megatron.core.transformer.transformer_layer import (\n"
                "            TransformerLayer,\n"
                "        )\n\n"
                "        inner, measure = TransformerLayer.forward, self._measure\n\n"
                "        def forward(self: Any, *arguments: Any, **named: Any) -> Any:\n"
                "            output = inner(self, *arguments, **named)\n"
                "            measure(self, arguments, output)\n"
                "            return output\n\n"
                "        TransformerLayer.forward = forward\n"
                "        return layer\n",
                "sizes.py",
            ),
        ),
        checks=("KIT-PATCH",),
        says="assigned the forward of what it wraps; return a ForwardLink instead",
    ),
)
