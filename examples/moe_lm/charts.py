"""The chart of a run: losses on the left, tokens per expert on the right."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

MAX_PANELS = 6
MAX_SMOOTH = 21  # steps
SMOOTHED_SHARE = 0.05  # the most of the steps that a mean is taken of
FEW_STEPS = 40  # a curve of so few steps shows each of them


def smooth(values: list[float], width: int) -> np.ndarray:
    """Return means over centred stretches of ``width`` values, shorter at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    half = np.minimum(width // 2, at)  # the first losses fall steeply and must not be pulled down by later ones
    low, high = at - half, np.minimum(at + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def smoothing_width(num_steps: int) -> int:
    """Return how many steps the curve of training is a mean of: an odd number, 1 for few steps."""
    return max(1, int(min(MAX_SMOOTH, SMOOTHED_SHARE * num_steps)) - 1) | 1


def draw(report: dict, path: Path) -> None:
    """Draw the chart of a report by ``Recorder.write``. Raises ImportError without matplotlib."""
    import matplotlib

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it says that it looks for fonts
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 12, "axes.titlesize": 13, "axes.titlelocation": "left"})
    counts = np.array(report["tokens_per_expert"]["counts"], dtype=float)  # [stretch, layer, expert]
    num_panels = min(MAX_PANELS, counts.shape[1])
    figure = plt.figure(figsize=(15, max(6.0, 2.6 * num_panels)), layout="constrained")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.05), wspace=0.03)[0]
    draw_losses(left.subplots(), report)
    draw_experts(right, counts, report)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_losses(axes, report: dict) -> None:
    from matplotlib.ticker import MaxNLocator

    training, held_out, final = report["training_bits_per_byte"], report["held_out"], report["final"]
    steps = np.arange(1, len(training) + 1)
    width = smoothing_width(len(training))
    if width > 1:
        axes.plot(steps, training, color="tab:blue", alpha=0.25, linewidth=0.8)
    label = f"training (mean of {width} steps)" if width > 1 else "training"
    marker = "." if len(training) <= FEW_STEPS else ""
    axes.plot(steps, smooth(training, width), color="tab:blue", marker=marker, label=label)
    at, bits = zip(*((point["step"], point["bits_per_byte"]) for point in held_out))
    axes.plot(at, bits, color="tab:orange", marker="o", markersize=4, label="held out (a sample)")
    value = final["held_out_bits_per_byte"]
    axes.plot(len(training), value, color="tab:red", marker="*", markersize=14, linestyle="none", zorder=5)
    axes.lines[-1].set_label(f"held out at the end, all: {value:.2f}")
    for name, style in (("unigram", "--"), ("bigram", ":")):
        bits = final[f"{name}_bits_per_byte"]
        axes.axhline(bits, color="black", linestyle=style, linewidth=1.2, label=f"{name} entropy: {bits:.2f}")
    axes.set(title="Loss", xlabel="step", ylabel="bits per byte", ylim=(0, 8.5))
    axes.set_xlim(0.5, len(training) * 1.02 + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")


def draw_experts(figure, counts: np.ndarray, report: dict) -> None:
    """Draw heat maps of up to ``MAX_PANELS`` layers: each expert's tokens over the mean, 1 for a balanced load."""
    from matplotlib.ticker import MaxNLocator

    _, num_layers, num_experts = counts.shape
    load = counts / counts.mean(-1, keepdims=True)
    layers = np.linspace(0, num_layers - 1, min(MAX_PANELS, num_layers)).round().astype(int)
    panels = figure.subplots(len(layers), 1, sharex=True, squeeze=False)[:, 0]
    last_step = len(report["training_bits_per_byte"])
    image = None
    for layer, axes in zip(layers, panels):
        extent = (0.5, last_step + 0.5, num_experts - 0.5, -0.5)
        image = axes.imshow(
            load[:, layer].T, aspect="auto", interpolation="nearest", extent=extent, cmap="RdBu_r", vmin=0, vmax=2
        )
        axes.set(title=f"Tokens per expert, layer {layer}", ylabel="expert")
        axes.set_yticks(np.arange(0, num_experts, max(1, num_experts // 8)))
        per_rank = num_experts // report["config"]["ranks"]
        for boundary in range(per_rank, num_experts, per_rank):
            axes.axhline(boundary - 0.5, color="black", linewidth=0.6, alpha=0.6)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    panels[-1].set_xlabel("step (thin lines separate the experts of different ranks)")
    bar = figure.colorbar(image, ax=list(panels), extend="max", pad=0.02, aspect=30)
    bar.set_label("tokens / mean")
