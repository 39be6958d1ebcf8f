"""How well new classes are taught and unknown photos are grouped, measured on folders of photos."""
