"""Which device and which dtype a deployment computes with."""

from __future__ import annotations

import torch

from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelConfig
from radixcast.protocols.server_args import ServerArgs

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(args: ServerArgs) -> torch.device:
    """`--device` as a torch device; auto is CUDA where there is one. Raises StartupError for a device that is not there."""
    if args.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(args.device)
    except RuntimeError:
        raise StartupError(f"--device must be auto, cpu, cuda or cuda:N, got {args.device}") from None
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"--device must be auto, cpu, cuda or cuda:N, got {args.device}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise StartupError(f"--device {args.device}: {torch.cuda.device_count()} CUDA devices were found")
    return device


def resolve_dtype(args: ServerArgs, config: ModelConfig, device: torch.device) -> torch.dtype:
    """`--dtype` as a torch dtype. auto: fp32 on the CPU, elsewhere what the weights were saved in."""
    if args.dtype != "auto":
        return _DTYPES[args.dtype]
    if device.type == "cpu":
        return torch.float32
    return _DTYPES.get(config.torch_dtype, torch.bfloat16)
