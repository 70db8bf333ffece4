"""`seq2seq.v1.Repository` through both clients; tests/server/models/test_repository.py tests what it does."""

import shutil

import pytest

from seq2seq_serve.client import AsyncClient, ClientError
from seq2seq_serve.protos.seq2seq_v1_pb2 import VERSION_STATE_READY
from tests.server.damage import make_weights_nan
from tests.server.service.harness import serving, serving_bundles


async def test_what_cannot_be_loaded_says_why_and_changes_nothing():
    async with serving(is_repository_open=True) as served, AsyncClient(served.address) as client:
        with pytest.raises(ClientError, match="NOT_FOUND: there is no bundle of a model named 'other'"):
            await client.load("other")
        with pytest.raises(ClientError, match="NOT_FOUND: echo has no version '2' on disk"):
            await client.load("echo", "2")
        with pytest.raises(ClientError, match="INVALID_ARGUMENT: the model's name is missing"):
            await client.load("")
        with pytest.raises(ClientError, match="NOT_FOUND: no model is named 'other'"):
            await client.unload("other")
        assert await client.translate("abc") == "abc"
        assert [one.model for one in await client.versions()] == ["echo"]


async def test_only_admins_see_and_change_what_is_served():
    async with serving() as served, AsyncClient(served.address) as client:
        for call in (client.load("echo"), client.unload("echo"), client.versions()):
            with pytest.raises(ClientError, match="PERMISSION_DENIED"):
                await call
        assert len(await client.models()) == 1


async def test_a_version_whose_weights_are_not_numbers_does_not_replace_the_good_one(bundle_path, tmp_path):
    """It was loaded with OK, and from then on every call ended with INTERNAL."""
    shutil.copytree(bundle_path, tmp_path / "model" / "1")
    async with (
        serving_bundles(tmp_path / "model", is_repository_open=True) as served,
        AsyncClient(served.address) as client,
    ):
        expected = await client.translate("abc")
        make_weights_nan(shutil.copytree(bundle_path, tmp_path / "model" / "2"))
        with pytest.raises(ClientError, match="FAILED_PRECONDITION") as caught:
            await client.load("model", "2")
        assert "is not a number: its weights are damaged, export the model again" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert await client.translate("abc") == expected
        ready = [one.version for one in await client.versions() if one.state == VERSION_STATE_READY]
        assert ready == ["1"]
