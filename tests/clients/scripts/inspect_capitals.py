"""A task for `inspect eval`: capitals, judged by whether the answer says them."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

CAPITALS = {"France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Japan": "Tokyo", "Chile": "Santiago"}


@task
def capitals():
    samples = [
        Sample(input=f"What is the capital of {country}?", target=city, id=country)
        for country, city in CAPITALS.items()
    ]
    return Task(dataset=samples, solver=generate(), scorer=includes())
