"""The parameters of one rank: exactly those of the built model, in its order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ascend_run.core.config.linear_biases import linear_biases
from ascend_run.core.config.vocabulary import has_tied_output
from ascend_run.plugin_api.contracts import ParameterCost
from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .saved import norm_of_inputs, norm_of_outputs
from .sizes import Sizes


def rank_parameters(
    config: RunConfig,
    layout: Layout,
    sizes: Sizes,
    layers: Sequence[int],
    moe_layers: Collection[int],
    *,
    is_first: bool,
    is_last: bool,
) -> tuple[ParameterCost, ...]:
    """Return the parameters of one pipeline stage on one of its ranks.

    Args:
        layers: Indices of its layers.
        moe_layers: Those of them that have experts.
    """
    depths = [layer for layer in layers if layer in sizes.mtp_layers]
    plain = [layer for layer in layers if layer not in sizes.mtp_layers]
    embeds = is_last and bool(depths)

    def layer_of(layer: int) -> Iterator[ParameterCost]:
        return _layer(config, layout, sizes, layer, layer in moe_layers)

    return (
        *(_embedding(config, layout, sizes, is_last=is_last) if is_first or embeds else ()),
        *(parameter for layer in plain for parameter in layer_of(layer)),
        *(_norm(config, "final_norm", sizes.hidden, None) if is_last else ()),
        *(parameter for n in depths for parameter in _mtp(config, layout, sizes, n, layer_of(n))),
        *(_output(config, sizes, tied_here=is_first or embeds) if is_last else ()),
    )


def _mtp(
    config: RunConfig, layout: Layout, sizes: Sizes, layer: int, of_layer: Iterator[ParameterCost]
) -> Iterator[ParameterCost]:
    """One depth of multi-token prediction around its transformer layer."""
    hidden = sizes.hidden
    for name in ("enorm", "hnorm"):
        yield from _norm(config, "mtp", hidden, layer, name)
    numel = 2 * hidden * hidden // layout.tp
    yield ParameterCost(part="mtp", name="eh_proj", numel=numel, layer=layer)
    yield from of_layer
    yield from _norm(config, "mtp", hidden, layer, "final_norm")


def _embedding(
    config: RunConfig, layout: Layout, sizes: Sizes, *, is_last: bool
) -> Iterator[ParameterCost]:
    model = config.model
    tied = has_tied_output(model)
    yield ParameterCost(
        part="embedding",
        name="word_embeddings",
        numel=sizes.vocab * sizes.hidden,
        # The table is used in a matmul only if it is tied to the output layer.
        is_matrix=tied and is_last,
        is_shared_embedding=layout.pp > 1 and (tied or bool(sizes.mtp_layers)),
    )
    if model.position_embedding_type == "learned_absolute":
        positions = model.max_position_embeddings or config.data.seq_length
        yield ParameterCost(
            part="embedding",
            name="position_embeddings",
            numel=positions * sizes.hidden,
            is_matrix=False,
        )
    if model.embedding_layernorm:
        yield from _norm(config, "embedding", sizes.hidden, None, "layernorm")


def _output(config: RunConfig, sizes: Sizes, *, tied_here: bool) -> Iterator[ParameterCost]:
    if labels := config.model.num_labels:
        yield ParameterCost(part="output_layer", name="weight", numel=labels * sizes.hidden)
        return
    tied = has_tied_output(config.model)
    if not (tied and tied_here):
        yield ParameterCost(
            part="output_layer",
            name="weight",
            numel=sizes.vocab * sizes.hidden,
            is_shared_embedding=tied,
        )
    if config.model.add_output_bias:
        yield ParameterCost(
            part="output_layer", name="weight_bias", numel=sizes.vocab, is_matrix=False
        )


def _layer(
    config: RunConfig, layout: Layout, sizes: Sizes, layer: int, has_experts: bool
) -> Iterator[ParameterCost]:
    model, hidden = config.model, sizes.hidden
    biases = linear_biases(model)
    before, after = norm_of_inputs(config), norm_of_outputs(config)
    if before:
        yield from _norm(config, "input_norm", hidden, layer)
    if model.softmax_type == "learnable":
        yield ParameterCost(
            part="self_attention",
            name="softmax_offset",
            numel=sizes.heads,
            is_matrix=False,
            layer=layer,
        )
    bias = hidden if biases.proj else 0
    yield from _linear(
        "self_attention", "linear_proj", sizes.out_width, hidden, layer, bias, whole_bias=True
    )
    if sizes.key_latent:
        yield from _latents(config, layout, sizes, layer)
    else:
        yield from _projections(config, sizes, layer)
    if after:
        yield from _norm(config, "self_attn_bda", hidden, layer)
    if before:
        yield from _norm(config, "mlp_norm", hidden, layer)
    if after:
        yield from _norm(config, "mlp_bda", hidden, layer)
    if not has_experts:
        yield from _feed_forward("mlp", sizes, sizes.ffn, layer, biases=biases.mlp)
    else:
        yield from _experts(config, layout, sizes, layer)


def _experts(
    config: RunConfig, layout: Layout, sizes: Sizes, layer: int
) -> Iterator[ParameterCost]:
    """Router, experts and shared experts."""
    hidden, biases = sizes.hidden, linear_biases(config.model)
    for name, columns in (("weight", hidden), *([("weight_bias", 1)] if biases.router else [])):
        yield ParameterCost(
            part="router",
            name=name,
            numel=sizes.all_experts * columns,
            is_matrix=name == "weight",
            layer=layer,
            sees_own_tokens=True,
        )
    # Without expert tensor parallelism, tensor-parallel ranks hold replicas of the experts.
    apart = not (layout.ep == 1 and layout.expt_tp == layout.tp)
    rows = sizes.fc1_rows * sizes.expert_ffn
    weights = {"fc1": rows * hidden, "fc2": hidden * sizes.expert_ffn}
    stacked = weights | ({"fc1_bias": rows, "fc2_bias": hidden} if biases.experts else {})
    for name, numel in stacked.items():
        yield ParameterCost(
            part="experts",
            name=name,
            numel=sizes.experts * numel,
            is_matrix=name in weights,
            is_expert=apart,
            layer=layer,
        )
    if sizes.shared_ffn:
        yield from _feed_forward("shared_experts", sizes, sizes.shared_ffn, layer, biases=False)
        if config.model.moe_shared_expert_gate:
            yield ParameterCost(
                part="shared_experts",
                name="gate_weight",
                numel=hidden,
                layer=layer,
                sees_own_tokens=True,
            )


def _projections(config: RunConfig, sizes: Sizes, layer: int) -> Iterator[ParameterCost]:
    """The fused QKV projection."""
    model = config.model
    rows = sizes.qkv_rows
    bias = rows if linear_biases(model).qkv else 0
    yield from _linear("self_attention", "linear_qkv", sizes.hidden, rows, layer, bias)
    if model.qk_layernorm:
        for name in ("q_layernorm", "k_layernorm"):
            yield from _norm(config, "self_attention", sizes.head_width, layer, name)


def _latents(
    config: RunConfig, layout: Layout, sizes: Sizes, layer: int
) -> Iterator[ParameterCost]:
    """Down and up projections of the latents, all column-parallel; norms are replicated."""

    def norm(name: str, width: int) -> Iterator[ParameterCost]:
        if config.model.qk_layernorm:
            yield from _norm(config, "self_attention", width, layer, name)

    def linear(name: str, columns: int, rows: int) -> Iterator[ParameterCost]:
        yield from _linear("self_attention", name, columns, rows, layer, 0)

    hidden, query, key = sizes.hidden, sizes.query_latent, sizes.key_latent
    if query:
        yield from linear("linear_q_down_proj", hidden, query // layout.tp)
        yield from norm("q_layernorm", query)
        yield from linear("linear_q_up_proj", query, sizes.query_width)
    else:
        yield from linear("linear_q_proj", hidden, sizes.query_width)
    yield from linear("linear_kv_down_proj", hidden, (key + sizes.rotated_width) // layout.tp)
    yield from norm("kv_layernorm", key)
    unturned = sizes.key_width - sizes.query_groups * sizes.rotated_width
    yield from linear("linear_kv_up_proj", key, unturned + sizes.values_width)


def _feed_forward(
    part: str, sizes: Sizes, width: int, layer: int, *, biases: bool
) -> Iterator[ParameterCost]:
    rows, hidden = sizes.fc1_rows * width, sizes.hidden
    yield from _linear(part, "linear_fc1", hidden, rows, layer, rows if biases else 0)
    bias = hidden if biases else 0
    yield from _linear(part, "linear_fc2", width, hidden, layer, bias, whole_bias=True)


def _linear(
    part: str,
    name: str,
    columns: int,
    rows: int,
    layer: int,
    bias: int,
    *,
    whole_bias: bool = False,
) -> Iterator[ParameterCost]:
    """A weight and its bias, which is replicated if the weight is row-parallel."""
    yield ParameterCost(part=part, name=name, numel=rows * columns, layer=layer)
    if bias:
        yield ParameterCost(
            part=part,
            name=f"{name}_bias",
            numel=bias,
            is_matrix=False,
            layer=layer,
            sees_own_tokens=whole_bias,
        )


def _norm(
    config: RunConfig, part: str, width: int, layer: int | None, name: str = "weight"
) -> Iterator[ParameterCost]:
    names = [name, f"{name}_bias"] if config.model.normalization == "LayerNorm" else [name]
    for own in names:
        yield ParameterCost(
            part=part,
            name=own,
            numel=width,
            is_matrix=False,
            layer=layer,
            sees_own_tokens=True,
        )


def trains_output(config: RunConfig, parameters: Sequence[ParameterCost]) -> bool:
    """Whether the output layer's weight is trained, which may be tied to the embedding."""
    tied = has_tied_output(config.model)
    # The last stage has its own copy of a tied table.
    return bool(trained_ends(parameters) & {"output_layer", *(["embedding"] if tied else [])})


def trained_ends(parameters: Sequence[ParameterCost]) -> set[str]:
    """Return the parts outside the layers that have trained parameters."""
    return {p.part for p in parameters if p.layer is None and p.trained}
