"""The picture of `podring bench --plot`: rows as JSON on stdin, the PNG's path as the only argument."""

from __future__ import annotations

import json
import sys
from typing import Any


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Bus bandwidth and time against size for each operation, one line per backend, rank count and host count."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ops = list(dict.fromkeys(row["op"] for row in rows if row["bytes"]))
    if not ops:
        raise SystemExit("nothing to plot: no operation with a size was measured")
    hosts = {row["hosts"] for row in rows}
    figure, axes = plt.subplots(2, len(ops), figsize=(max(6.0, 4.2 * len(ops)), 7), squeeze=False, sharex=True)
    for column, op in enumerate(ops):
        lines: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
        for row in rows:
            if row["op"] == op:
                lines.setdefault((row["backend"], row["ranks"], row["hosts"]), []).append(row)
        colours = {ranks: f"C{index}" for index, ranks in enumerate(sorted({key[1] for key in lines}))}
        for (backend, ranks, host_count), points in sorted(lines.items()):
            points.sort(key=lambda row: row["bytes"])
            sizes = [row["bytes"] for row in points]
            label = f"{backend}, {ranks} ranks" + (f", {host_count} hosts" if len(hosts) > 1 else "")
            style = {
                "label": label,
                "marker": "o",
                "markersize": 3,
                "color": colours[ranks],
                "linestyle": "-" if backend == "podring" else "--",
            }
            axes[0][column].plot(sizes, [row["busbw_gbps"] for row in points], **style)
            axes[1][column].plot(sizes, [row["p50_us"] for row in points], **style)
        axes[0][column].set_title(f"{op} ({rows[0]['dtype']})")
        axes[1][column].set_xlabel("bytes per rank")
        for row_index in (0, 1):
            axes[row_index][column].set_xscale("log", base=2)
            axes[row_index][column].set_yscale("log", nonpositive="clip")
            axes[row_index][column].grid(True, which="major", alpha=0.3)
    axes[0][0].set_ylabel("bus bandwidth, GB/s")
    axes[1][0].set_ylabel("time (p50), µs")
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw(json.load(sys.stdin), sys.argv[1])
