"""What tests of engines share."""

import uuid

import pytest

from langchain_rcr.index.pgvector import PgVectorIndex


@pytest.fixture
def new(postgres_url):
    """Makes PostgreSQL indexes, each over a collection of this test alone unless it is named."""
    made = []

    def build(name="", url=postgres_url, **options):
        index = PgVectorIndex(url, name or uuid.uuid4().hex, **options)
        made.append(index)
        return index

    yield build
    for index in made:
        index.close()
