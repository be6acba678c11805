"""The paper's circuit boards as streams of requests (CoServe, section 5.1), and what it leaves open.

Given: 352 and 342 component types, a classification expert (ResNet101) for each, object detection experts (YOLOv5m and
YOLOv5l) that several types share and that are asked when the classification found nothing, an image every 4 ms, 2,500
or 3,500 images.

Assumed: the type of an image is drawn alone, with probability 1 / rank ** `SKEW`, with which Samba-CoE switches about
as often as in the paper (1,060 times in task B2); every other type goes on to one of 12 detectors; 5 % of images show
damage, which ends their inspection.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from shell_router.expert_pools import Expert, Request

SKEW = 1.2
DETECTORS = 12
DAMAGED = 0.05
IMAGE_EVERY_S = 0.004
BYTES = {"ResNet101": 178_000_000, "YOLOv5m": 85_000_000, "YOLOv5l": 186_000_000}
"""Four for each published parameter: 44.5, 21.2 and 46.5 million. The paper's 13 billion in 60 GB agree with that."""


@dataclass(frozen=True, slots=True)
class Task:
    """So many images of a board with so many component types."""

    name: str
    types: int
    images: int


TASKS = (Task("A1", 352, 2500), Task("A2", 352, 3500), Task("B1", 342, 2500), Task("B2", 342, 3500))


def shares(types: int, skew: float = SKEW) -> list[float]:
    """Per type, the share of the images that show it."""
    weights = [1 / rank**skew for rank in range(1, types + 1)]
    return [weight / sum(weights) for weight in weights]


def chain(component: int) -> tuple[str, ...]:
    """The experts that look at a component, if the first finds nothing."""
    return (f"type-{component}",) if component % 2 else (f"type-{component}", f"detector-{component // 2 % DETECTORS}")


def experts(types: int, skew: float = SKEW) -> list[Expert]:
    """The board's experts, with usage probabilities worked out from the rules, as in section 4.5."""
    usage, after = [0.0] * DETECTORS, [set[str]() for _ in range(DETECTORS)]
    catalogue = []
    for component, share in enumerate(shares(types, skew)):
        catalogue.append(Expert(f"type-{component}", "ResNet101", BYTES["ResNet101"], share))
        if component % 2 == 0:
            detector = component // 2 % DETECTORS
            usage[detector] += share * (1 - DAMAGED)
            after[detector].add(f"type-{component}")
    for detector in range(DETECTORS):
        kind = "YOLOv5m" if detector % 2 else "YOLOv5l"
        catalogue.append(Expert(f"detector-{detector}", kind, BYTES[kind], usage[detector], frozenset(after[detector])))
    return catalogue


def requests(task: Task, seed: int, skew: float = SKEW) -> Iterator[Request]:
    """The task's images in order; a request's sample says whether its component is damaged."""
    draw = random.Random(f"{task.name}/{seed}")
    upto = list(accumulate(shares(task.types, skew)))
    for number, component in enumerate(draw.choices(range(task.types), cum_weights=upto, k=task.images)):
        yield Request(str(number), chain(component), draw.random() < DAMAGED)


def route(request: Request, name: str, output: object) -> tuple[str, object] | None:
    """Damage ends the inspection."""
    then = request.after(name)
    return None if then is None or request.sample else (then, request.sample)
