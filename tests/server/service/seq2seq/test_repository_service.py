"""`seq2seq.v1.Repository` through both clients; tests/server/models/test_repository.py tests what it does."""

import pytest

from seq2seq_serve.client import AsyncClient, ClientError
from tests.server.service.harness import serving


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
