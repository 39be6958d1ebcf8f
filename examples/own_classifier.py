"""Verdicts for a classifier of your own, from its logits on images that it was not trained on.

    python examples/own_classifier.py

The classifier is scikit-learn's logistic regression on digits; any other that gives logits or
probabilities does as well. A third of the digits trains it, a third fits the monitor, a third is new.
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import candid

x, y = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(y))  # they are sorted by writer
x, y = x[order] / 16, y[order]
classifier = LogisticRegression().fit(x[:600], y[:600])
logits = classifier.decision_function

monitor = candid.Monitor(novelty=0.05, error=0.05)
monitor.fit(logits(x[600:1200]), y[600:1200], features=x[600:1200])
for sentence in monitor.sentences():
    print(sentence)

new = {
    "digits": x[1200:],
    "upside down": x[1200:].reshape(-1, 8, 8)[:, ::-1].reshape(-1, 64),
    "negatives": 1 - x[1200:],
    "noise": np.random.default_rng(0).random((300, 64)),
}
print(f"\n{'images':<12} {'accept':>7} {'ambiguous':>10} {'novel':>6}   right of accepted")
for name, images in new.items():
    verdicts, labels = monitor.verdicts(logits(images), images), monitor.predict(logits(images), images)
    share = {verdict: f"{np.mean(verdicts == verdict):.1%}" for verdict in ("accept", "ambiguous", "novel")}
    accepted = verdicts == "accept"
    right = f"{np.mean(labels[accepted] == y[1200:][accepted].astype(str)):.1%}" if name == "digits" else "–"
    print(f"{name:<12} {share['accept']:>7} {share['ambiguous']:>10} {share['novel']:>6}   {right}")
