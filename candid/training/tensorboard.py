"""The metrics of every epoch for TensorBoard, if it is installed."""

from pathlib import Path

from candid._support.errors import CandidError
from candid.training.run_folder import Row


class TensorBoardWriter:
    """Writes one scalar for each metric of an epoch; hides what a killed run wrote beyond its state."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise CandidError(
                "TensorBoard is not installed: pip install 'candid-vision[tensorboard]', or leave "
                "--tensorboard out."
            ) from error
        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def epoch(self, row: Row) -> None:
        for key, value in row.items():
            self.writer.add_scalar(key, value, int(row["step"]))
        self.writer.flush()
