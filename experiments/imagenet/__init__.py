"""The paper's tables and figures from released checkpoints and an ImageNet folder: one command, one page."""
