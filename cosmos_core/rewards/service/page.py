"""Status page at `/`: rewards, queue, throughput and recent errors; plain HTML without scripts."""

import time
from collections import Counter
from html import escape

from cosmos_core.rewards.service.engine import Engine

RESPONSE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
_STYLE_SHEET = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1d2330;
  background: #fbfbfd }
h1 { font-size: 1.4rem; margin-bottom: .2rem } h2 { font-size: 1.05rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th { text-align: right; font-weight: 600; border-bottom: 2px solid #d5d9e2; padding: .3rem .6rem }
td { text-align: right; border-bottom: 1px solid #e8eaf0; padding: .3rem .6rem; font-variant-numeric: tabular-nums }
th:first-child, td:first-child { text-align: left }
.ok { color: #18794e } .bad { color: #b42318 } p { color: #4b5565 } li { font-family: ui-monospace, monospace;
  font-size: .85rem; overflow-wrap: anywhere }
"""
_COLUMNS = ("reward", "processes", "waiting", "scoring", "items", "seconds / item", "errors", "replaced", "tried again")


def render_page(engine: Engine, response_counts: Counter[tuple[str, int]]) -> str:
    """Return the HTML of the status page; `response_counts` counts responses by route and HTTP status."""
    table_rows = "".join(_render_reward_row(name, engine) for name in engine.pools)
    errors = sorted((text for pool in engine.pools.values() for text in pool.errors), reverse=True)[:20] or ["none"]
    error_list_items = "".join(f"<li>{escape(text)}</li>" for text in errors)
    responses_text = ", ".join(f"{escape(path)} {status}: {n}" for (path, status), n in sorted(response_counts.items()))
    state_text = "ends after what it has accepted" if engine.is_draining else "takes requests"
    pending_text = f"{len(engine.pending_requests)} requests wait ({engine.pending_bytes / 2**20:.1f} MiB)"
    table_header = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=5><title>Rewards</title>"
        f"<style>{_STYLE_SHEET}</style><h1>Reward service</h1>"
        f"<p>It {state_text}; {pending_text}; {engine.items_per_second():.1f} items/s over the last minute; "
        f"{engine.num_accepted_requests} requests accepted; {escape(engine.config.queue)} queue; "
        f"{time.strftime('%Y-%m-%d %H:%M:%S')}.</p>"
        f"<table><tr>{table_header}</tr>{table_rows}</table><h2>Last errors</h2><ul>{error_list_items}</ul>"
        f"<h2>Responses</h2><p>{responses_text or 'none'}</p></html>"
    )


def _render_reward_row(reward_name: str, engine: Engine) -> str:
    pool = engine.pools[reward_name]
    counters, num_devices = pool.counters, len(pool.settings.reward.process_devices)
    css_class = "ok" if pool.num_ready_processes == num_devices else "bad"
    processes_cell = f"<td class={css_class}>{pool.num_ready_processes} of {num_devices}</td>"
    cell_values = (
        len(pool.queue), pool.num_jobs_in_flight, counters.items,
        f"{counters.seconds / counters.items:.4f}" if counters.items else "",
        counters.errors, counters.restarts, counters.retried,
    )  # fmt: skip
    number_cells = "".join(f"<td>{number}</td>" for number in cell_values)
    return f"<tr><td>{escape(reward_name)}</td>{processes_cell}{number_cells}</tr>"
