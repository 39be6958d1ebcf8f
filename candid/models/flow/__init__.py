"""Pixel models: an invertible network on pixels with a Gaussian mixture on its latent."""
