"""The one place where an engine is chosen."""

from __future__ import annotations

from ep_dispatcher.engines.base import Engine, EngineConfig

ENGINES = ("cpu",)  # those of this build


def choose(engine: str) -> str:
    """ "auto" -> the best engine that can run here. ValueError when the one asked for is not there."""
    if engine == "auto":
        return "cpu"
    if engine not in ENGINES:
        raise ValueError(f"engine: given {engine!r}, allowed: 'auto', {', '.join(repr(e) for e in ENGINES)}")
    return engine


def make(engine: str, config: EngineConfig) -> Engine:
    from ep_dispatcher.engines.cpu import CpuEngine

    return {"cpu": CpuEngine}[engine](config)


__all__ = ["ENGINES", "Engine", "EngineConfig", "choose", "make"]
