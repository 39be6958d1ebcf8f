"""What asks a model: examinations, held-out scores, detection, groups and watches of images."""
