"""A score of your own decides what is novel: register it, and verdicts, tables and watches have it.

    python examples/own_score.py

A classifier of the digits 0 to 7 meets 8 and 9. The score is the margin between the two largest posteriors,
which falls when an image is between classes; the table compares it with scores that Candid has.
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import candid


def margin(columns):
    """Return (N,), low for outliers, from columns that follow from the logits."""
    return columns["max_posterior"] - columns["second_posterior"]


candid.register_score(
    candid.Score("margin", "classifier", ("max_posterior", "second_posterior"), statistic=margin)
)

x, y = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(y))  # they are sorted by writer
x, y = x[order] / 16, y[order]
known = y < 8
training, held_out, new = np.split(np.flatnonzero(known), [500, 1000])
classifier = LogisticRegression().fit(x[training], y[training])


def columns_of(images):
    """Return the logits and the features of images."""
    return classifier.decision_function(images), images


print(f"{'score':<16} {'0 to 7 called novel':>20} {'8 and 9 found':>14}")
for score in ("margin", "energy", "mahalanobis++", "combined"):
    logits, features = columns_of(x[held_out])
    monitor = candid.Monitor(novelty=0.05, score=score).fit(logits, y[held_out], features)
    ordinary, unknown = (monitor.verdicts(*columns_of(images)) for images in (x[new], x[~known]))
    print(f"{score:<16} {np.mean(ordinary == 'novel'):>20.1%} {np.mean(unknown == 'novel'):>14.1%}")
