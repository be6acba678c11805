"""A plan as a Gantt chart: a small SVG, in colours for a light page or a dark one, as the reader prefers."""

from collections.abc import Mapping
from xml.sax.saxutils import escape

from shell_router.batch.plan import Plan, Session

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 800, 80, 20, 56, 34, 24
HUES = 360
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #333 }
  .title { font-size: 14px; font-weight: 600 }
  .session { stroke: #fff } .inside { fill: #111 }
  @media (prefers-color-scheme: dark) { text { fill: #ddd } .session { stroke: #111 } .inside { fill: #111 } }
"""


def draw_plan(plan: Plan) -> str:
    """The SVG's text: a row per worker, a bar per session, a colour per expert."""
    names = sorted({session.expert for session in plan.sessions})
    hues = {name: HUES * number // len(names) for number, name in enumerate(names)}
    rows = 1 + max((session.worker for session in plan.sessions), default=0)
    height = TOP + ROW * rows + 12
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<style>{STYLE}</style>",
            f'<text class="title" x="{LEFT}" y="20">{escape(plan.method)}: {plan.makespan_s:.1f} s</text>',
            *(
                f'<text x="{LEFT - 8}" y="{_top(row) + 16}" text-anchor="end">worker {row}</text>'
                for row in range(rows)
            ),
            *(_bar(session, plan.makespan_s, hues) for session in plan.sessions),
            "</svg>\n",
        )
    )


def _bar(session: Session, makespan_s: float, hues: Mapping[str, int]) -> str:
    """One session; its name is written inside where there is room, and is told when one points at it anywhere."""
    scale = (WIDTH - LEFT - RIGHT) / makespan_s if makespan_s else 0.0
    x, width, y = LEFT + scale * session.begin_s, scale * (session.end_s - session.begin_s), _top(session.worker)
    name = escape(f"{session.expert} \u00d7 {session.prompts}")
    told = f"<title>{name}: {session.begin_s:.1f} to {session.end_s:.1f} s</title>"
    place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"'
    bar = f'<rect class="session" {place} fill="hsl({hues[session.expert]} 60% 72%)">{told}</rect>'
    inside = f'<text class="inside" x="{x + 5:.1f}" y="{y + 16}">{name}</text>'
    return bar + inside if width > 7 * len(name) else bar


def _top(row: int) -> int:
    return TOP + ROW * row - 16
