"""Models are built with their first use: none of them is wrong, and threads may use one first together."""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pydantic
import pytest
import rollyard_crds
from pydantic import Field, ValidationError
from rollyard_crds.base import DEFER_BUILD, Deferred, Model, build, build_all
from rollyard_crds.trajectory import Record
from rollyard_testing.pace import patience

THREADS = 8


def _below(model: type[pydantic.BaseModel]) -> Iterator[type[pydantic.BaseModel]]:
    for one in model.__subclasses__():
        yield one
        yield from _below(one)


def test_every_model_can_be_built() -> None:
    """An error in the definition of a model is found here, because an import no longer finds it."""
    for module in pkgutil.walk_packages(rollyard_crds.__path__, "rollyard_crds."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    build_all()
    models = {one for one in _below(Deferred) if one.__module__.startswith("rollyard_crds.")}
    assert len(models) > 50
    assert [model for model in models if not model.__pydantic_complete__] == []


def test_a_model_is_built_with_its_first_use() -> None:
    class Inner(Model):
        size: int = 1

    class Outer(Model):
        inner: Inner = Field(default_factory=Inner)

    assert (Outer.__pydantic_complete__, Inner.__pydantic_complete__) == (not DEFER_BUILD, not DEFER_BUILD)
    assert Outer().inner.size == 1
    assert Outer.__pydantic_complete__
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Outer.model_validate({"more": 1})


def test_build_takes_the_models_of_defaults_along() -> None:
    class Inner(Model):
        size: int = 1

    class Outer(Model):
        inner: Inner = Field(default_factory=Inner)

    build(Outer)
    assert Outer.__pydantic_complete__
    assert Inner.__pydantic_complete__


def test_threads_may_use_a_model_first_together() -> None:
    """Each thread gets the model's own validator, which refuses unknown fields and checks values."""
    for _ in range(20):

        class Part(Record):
            numbers: list[int] = Field(max_length=2)

        class Whole(Model):
            parts: dict[str, Part]
            number: int = 0

        barrier = threading.Barrier(THREADS)

        def first(place: int, model: type[Model] = Whole, barrier: threading.Barrier = barrier) -> str:
            barrier.wait(timeout=patience(10))
            if place % 2:
                return model.model_validate({"parts": {"a": {"numbers": ["1"]}}}).model_dump_json()
            with pytest.raises(ValidationError) as refused:
                model.model_validate({"parts": {"a": {"numbers": [1, 2, 3]}}, "more": 1})
            return " ".join(sorted(error["type"] for error in refused.value.errors()))

        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(first, range(THREADS)))
        assert set(found[1::2]) == {'{"parts":{"a":{"numbers":[1]}},"number":0}'}
        assert set(found[::2]) == {"extra_forbidden too_long"}
