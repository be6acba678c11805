"""The paper's two devices (CoServe, Table 1), and what it leaves open.

Given: memories, the disks' rates; one image takes under 40 ms; loading takes over 60 % of load and inference together
from CPU memory and over 90 % from disk, on both devices (Figure 1); one more ResNet101 image takes the memory of 1.5
experts; batches of 6 (GPU) and 5 (CPU) are best on UMA; 35 and 34 experts on the NUMA GPU for boards A and B; 3 GPU
executors for A and 4 for B, and one on the CPU.

Assumed: K and B such that one image takes 40 ms on the GPU and a busy one does about 27 images a second, the paper's
best. A load takes 60 ms from CPU memory, the least that Figure 1 allows, and 1.1 s from disk: 10.5 times less than 27.2
images a second are one each 386 ms, of which 40 ms are inference, and 1,060 switches in 3,500 images make up the rest.
The disk is occupied for all of a load but what CPU memory would take, by one load at a time. The NUMA GPU's best batch
is 8; a CPU is six times slower. Frameworks and the system take 1 GB of the GPU and 4 GB of CPU memory. Executors of one
processor share it evenly.
"""

from dataclasses import dataclass

from benchmarks.coserving.boards import BYTES, Task
from shell_router.expert_pools import Costs, ExecutorSettings

GB = 1_000_000_000
HOST_LOAD_S, FROM_DISK_S = 0.060, 1.1
WORK = {"ResNet101": 1.0, "YOLOv5m": 0.6, "YOLOv5l": 1.0}
ACTIVATION_BYTES = int(1.5 * BYTES["ResNet101"])


@dataclass(frozen=True, slots=True)
class Device:
    """Executors of a system on a device: `several` for each of a task's boards, `one` that has the whole GPU."""

    name: str
    disk_rate: float
    best_batch: int
    gpu_sample_s: float
    gpu_batch_s: float
    gpu_bytes: int
    cpu_bytes: int
    host_bytes: int
    gpu_experts: tuple[int, int] | None

    def costs(self, slower: float, largest: int) -> dict[str, Costs]:
        """Per architecture, on its GPU or a processor so many times slower."""
        return {
            kind: Costs(
                sample_s=slower * work * self.gpu_sample_s,
                batch_s=slower * work * self.gpu_batch_s,
                largest_batch=largest,
                activation_bytes=int(work * ACTIVATION_BYTES),
                host_load_s=HOST_LOAD_S * BYTES[kind] / BYTES["ResNet101"],
                disk_load_s=self._from_disk_s(kind),
            )
            for kind, work in WORK.items()
        }

    def _from_disk_s(self, kind: str) -> float:
        share = BYTES[kind] / BYTES["ResNet101"]
        return max(FROM_DISK_S * share, BYTES[kind] / self.disk_rate + HOST_LOAD_S * share)

    def several(self, task: Task) -> list[ExecutorSettings]:
        """CoServe's best arrangement: 3 executors on the GPU for board A and 4 for board B, and one on the CPU."""
        on_gpu = 3 if task.name.startswith("A") else 4
        share = 0.75
        if self.gpu_experts:
            share = self.gpu_experts[on_gpu - 3] * BYTES["ResNet101"] / self.gpu_bytes
        each, gpu = self.gpu_bytes // on_gpu, self.costs(1.0, self.best_batch)
        executors = [ExecutorSettings(f"gpu-{number}", each, gpu, share) for number in range(on_gpu)]
        return [*executors, ExecutorSettings("cpu", self.cpu_bytes, self.costs(6.0, 5))]

    def one(self) -> list[ExecutorSettings]:
        """Samba-CoE's: the GPU alone; where memory is shared, all of it."""
        memory_bytes = self.gpu_bytes if self.host_bytes else self.gpu_bytes + self.cpu_bytes
        return [ExecutorSettings("gpu-0", memory_bytes, self.costs(1.0, self.best_batch), 0.9)]

    def cache_bytes(self, executors: int) -> int:
        """Host memory in front of the disk: what the CPU's executor does not take."""
        return self.host_bytes + (self.cpu_bytes if executors == 1 and self.host_bytes else 0)


DEVICES = (
    Device("NUMA", 530e6, 8, 0.025, 0.015, 11 * GB, 4 * GB, 8 * GB, (35, 34)),
    Device("UMA", 3000e6, 6, 0.025, 0.015, 16 * GB, 4 * GB, 0, None),
)
