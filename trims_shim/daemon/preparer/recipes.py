"""What a recipe may ask of onnxruntime: config entries and provider options known to be harmless.

Both ends hold to it. Clients leave other sessions to the original. The preparer checks it again, as
a client may be in another container and say anything: other entries have onnxruntime write to files
of any name, and some options are addresses that it calls. Imports nothing of onnxruntime.
"""

from __future__ import annotations

from trims_shim.errors import NotServed
from trims_shim.wire.messages import SessionRecipe

__all__ = ["NO_PREPACKING", "OF_THE_PROCESS", "OF_THE_RUN", "check", "check_entry"]

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_PROVIDERS = ((_CPU,), (_CUDA,), (_CUDA, _CPU))

NO_PREPACKING = "session.disable_prepacking"
OF_THE_RUN = frozenset(
    {
        "session.dynamic_block_base",
        "session.force_spinning_stop",
        "session.inter_op.allow_spinning",
        "session.inter_op.spin_backoff_max",
        "session.inter_op.spin_duration_us",
        "session.intra_op.allow_spinning",
        "session.intra_op.spin_backoff_max",
        "session.intra_op.spin_duration_us",
        "session.intra_op_thread_affinities",
        "session.prepack.enable_parallel",
        "session.use_device_allocator_for_initializers",
        "session.use_env_allocators",
    }
)
"""Config entries that decide how a session works, not what it computes."""
_OF_THE_MODEL = frozenset(
    {
        "mlas.disable_kleidiai",
        "mlas.enable_gemm_fastmath_arm64_bfloat16",
        "mlas.kleidiai.conv_igemm_max_work",
        "mlas.nchwc_depthwise_sliding",
        "mlas.nchwc_pointwise_conv_max_input_channel_batch",
        "mlas.qnbit.force_fp32",
        "mlas.use_lut_gemm",
        "optimization.constant_folding_max_output_size_in_bytes",
        "optimization.disable_specified_optimizers",
        "optimization.enable_cast_chain_elimination",
        "optimization.enable_gelu_approximation",
        "session.allow_released_opsets_only",
        "session.disable_aot_function_inlining",
        "session.disable_cpu_ep_fallback",
        "session.disable_double_qdq_remover",
        "session.disable_qdq_constant_folding",
        "session.disable_quant_qdq",
        "session.enable_dq_matmulnbits_fusion",
        "session.enable_quant_qdq_cleanup",
        "session.function_expansion_byte_limit",
        "session.function_expansion_node_limit",
        "session.gqa_value_layout",
        "session.graph_optimizations_loop_level",
        "session.qdq_matmulnbits_accuracy_level",
        "session.qdq_matmulnbits_block_size",
        "session.qdqisint8allowed",
        "session.set_denormal_as_zero",
        "session.x64quantprecision",
    }
)
"""Config entries that are part of the recipe."""
_NAMESPACES = ("ep.", "memory.", "mlas.", "optimization.", "session.")
"""Prefixes of onnxruntime's own config entries; only custom operators read others."""
OF_THE_PROCESS = frozenset(
    {
        "gpu_external_alloc",
        "gpu_external_empty_cache",
        "gpu_external_free",
        "has_user_compute_stream",
        "user_compute_stream",
    }
)
"""Options of CUDA's provider that are addresses in the client: where a session works, not what it
computes."""


def check_entry(key: str) -> None:
    """Raise NotServed (``config_entry``) unless a recipe may have a config entry of this name."""
    is_known = key in _OF_THE_MODEL or key in OF_THE_RUN
    if not is_known and key.startswith(_NAMESPACES):
        raise NotServed("config_entry", f"config entry {key} is set")


def check(recipe: SessionRecipe) -> None:
    """Raise NotServed for what no client of ours asks: ``config_entry``, ``provider``."""
    for key, _ in recipe.entries:
        check_entry(key)
    names = tuple(name for name, *_ in recipe.providers)
    options = {text for provider in recipe.providers for text in provider[1::2]}
    if names not in _PROVIDERS or not options.isdisjoint(OF_THE_PROCESS):
        raise NotServed("provider", f"providers {recipe.providers!r:.200}")
