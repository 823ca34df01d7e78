"""Which tile, how many warps and stages, and how many splits: a small table, read once.

``tiles.json`` holds it, one list a GPU architecture and head dim, ordered by ``block_m``, the query rows of one
program. The environment variable ``POLYKV_TRITON_TILES`` names another file, for example one that ``python -m
polykv_kernels.triton.autotune`` wrote. Nothing is tuned at run time: an agent's first token would wait for it, and two
runs could choose differently and round differently.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

TILES_FILE = Path(__file__).with_name("tiles.json")


@dataclass(frozen=True, slots=True)
class Tile:
    """One configuration of the attention kernel.

    Attributes:
        block_m: query rows (tokens times the GQA group) of one program, a power of two from 16 up.
        num_warps: warps (wavefronts on AMD) of one program.
        num_stages: depth of the software pipeline over 64-token tiles.
        block_n: packed tokens multiplied at a time, 64 or 32; fewer cost fewer registers.
    """

    block_m: int
    num_warps: int
    num_stages: int
    block_n: int = 64


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How the tokens are divided among programs when heads and row blocks alone would leave the GPU idle.

    Attributes:
        programs_per_processor: programs to aim for, per multiprocessor.
        min_tiles: 64-token tiles that a split has at least, so that its partial result is worth its merge.
    """

    programs_per_processor: int
    min_tiles: int

    def splits(self, tiles: int, programs: int, processors: int) -> int:
        """Number of splits of ``tiles`` tiles, where ``programs`` programs exist for each split."""
        wanted = -(-self.programs_per_processor * processors // max(programs, 1))
        return max(1, min(wanted, tiles // self.min_tiles))


@dataclass(frozen=True, slots=True)
class TileTable:
    """The whole table.

    Attributes:
        tiles: architecture -> head dim -> tiles in the order of their ``block_m``.
        splits: architecture -> split rule.
    """

    tiles: dict[str, dict[int, tuple[Tile, ...]]]
    splits: dict[str, SplitRule]

    def tile(self, architecture: str, head_dim: int, stacked_rows: int) -> Tile:
        """The smallest tile that holds all the rows, or else the largest.

        Every row block dequantises the tokens again, so a tile that holds all rows at once is worth its idle lanes.
        """
        tiles = self.tiles[architecture][head_dim]
        return next((tile for tile in tiles if tile.block_m >= stacked_rows), tiles[-1])

    def to_json(self) -> dict[str, Any]:
        """The table as ``tiles.json`` has it."""
        return {
            architecture: {
                "splits": asdict(self.splits[architecture]),
                "tiles": {str(dim): [asdict(tile) for tile in tiles] for dim, tiles in by_dim.items()},
            }
            for architecture, by_dim in self.tiles.items()
        }


def read_table(path: Path) -> TileTable:
    """Reads a tiles file.

    Raises:
        ValueError: the file does not have the form of ``tiles.json``.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        tiles = {
            architecture: {
                int(dim): tuple(sorted((Tile(**entry) for entry in entries), key=lambda tile: tile.block_m))
                for dim, entries in part["tiles"].items()
            }
            for architecture, part in document.items()
        }
        splits = {architecture: SplitRule(**part["splits"]) for architecture, part in document.items()}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a tiles file: {error!r}") from error
    return TileTable(tiles, splits)


def tiles_file() -> Path:
    """The file in use: the one that ``POLYKV_TRITON_TILES`` names, or the shipped one."""
    return Path(os.environ.get("POLYKV_TRITON_TILES") or TILES_FILE)


@lru_cache(maxsize=1)
def default_table() -> TileTable:
    """The table in :func:`tiles_file`, read once."""
    return read_table(tiles_file())


def architecture_for(capability: tuple[int, int] | None) -> str:
    """The table's architecture for a device.

    Args:
        capability: CUDA compute capability, or None for an AMD GPU.

    Returns:
        The architecture itself if the table has it, else the one whose limits the device shares: 12.x, for example, has
        the mma.sync instructions and the 99 KB of shared memory of 8.x, not the tensor memory of 10.x.
    """
    if capability is None:
        return "gfx942"
    return {9: "sm_90", 10: "sm_100"}.get(capability[0], "sm_80")


@lru_cache(maxsize=16)
def device_properties(device: torch.device) -> tuple[str, int]:
    """``(architecture in the table, multiprocessors)`` of a device; one processor for the interpreter."""
    if device.type != "cuda":
        return "sm_80", 1
    properties = torch.cuda.get_device_properties(device)
    capability = None if torch.version.hip else (properties.major, properties.minor)
    return architecture_for(capability), properties.multi_processor_count
