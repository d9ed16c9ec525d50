"""Stand-in for Open-Jev (see `jev/__init__.py`): probabilities and confidences."""

import math


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    """`exp(logit / temperature)`, normalised. ValueError unless temperature is finite and positive."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError("temperature must be finite and positive")
    top = max(logits)
    weights = [math.exp((logit - top) / temperature) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def choice_confidence(probabilities: list[float]) -> float:
    """`(max p - 1/n) / (1 - 1/n)`: 0 for a uniform answer, 1 for a certain one and for n = 1."""
    n = len(probabilities)
    return 1.0 if n == 1 else (max(probabilities) - 1 / n) / (1 - 1 / n)


def score_confidence(probabilities: list[float]) -> float:
    """`max(0, 1 - E|i - mode| / mean|i - (n-1)/2|)`: how near the mode the levels' mass lies; 1 for n = 1."""
    n = len(probabilities)
    if n == 1:
        return 1.0
    mode = probabilities.index(max(probabilities))
    spread = math.fsum(p * abs(i - mode) for i, p in enumerate(probabilities))
    reference = math.fsum(abs(i - (n - 1) / 2) for i in range(n)) / n
    return max(0.0, 1 - spread / reference)
