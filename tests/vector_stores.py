"""Real LangChain vector stores that run in this process, or on the tests' PostgreSQL, each with a pool of its own."""

import uuid

import pytest
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_rcr.index.vectorstore import VectorStoreIndex


def _in_memory(request, **options):
    return VectorStoreIndex(InMemoryVectorStore, **options)


def _chroma(request, **options):
    chroma = pytest.importorskip("langchain_chroma")
    from chromadb.config import Settings

    # "ip" and "cosine" are the other metrics, and rank the same. With so many neighbours the graph misses nothing.
    graph = {"space": "l2", "ef_search": 1000, "ef_construction": 1000, "max_neighbors": 100}
    return VectorStoreIndex(
        chroma.Chroma,
        collection_name=f"p{uuid.uuid4().hex}",
        collection_configuration={"hnsw": graph},
        client_settings=Settings(anonymized_telemetry=False),
        **options,
    )


def _qdrant(request, distance="DOT", **options):
    qdrant = pytest.importorskip("langchain_qdrant")
    from qdrant_client.models import Distance

    return VectorStoreIndex(
        qdrant.QdrantVectorStore.construct_instance,
        client_options={"location": ":memory:"},
        collection_name="pool",
        distance=Distance[distance],
        **options,
    )


def _sqlalchemy(url):
    return url.replace("postgresql://", "postgresql+psycopg://", 1)


def _pgvector(request, **options):
    postgres = pytest.importorskip("langchain_postgres")
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine(_sqlalchemy(request.getfixturevalue("postgres_url")))
    request.addfinalizer(engine.dispose)
    name = uuid.uuid4().hex
    return VectorStoreIndex(postgres.PGVector, connection=engine, collection_name=name, pool=name, **options)


def _pgvectorstore(request, **options):
    postgres = pytest.importorskip("langchain_postgres")
    from langchain_postgres.v2.indexes import DistanceStrategy

    engine = postgres.PGEngine.from_connection_string(_sqlalchemy(request.getfixturevalue("postgres_url")))
    table = f"t{uuid.uuid4().hex}"
    request.addfinalizer(lambda: engine._run_as_sync(engine.close()))

    def make(embeddings):
        engine.init_vectorstore_table(table, vector_size=embeddings.size)
        return postgres.PGVectorStore.create_sync(
            engine, embeddings, table, distance_strategy=DistanceStrategy.EUCLIDEAN
        )

    return VectorStoreIndex(make, **options)


def _milvus(request, **options):
    milvus = pytest.importorskip("langchain_milvus")
    file = request.getfixturevalue("tmp_path") / f"p{uuid.uuid4().hex}.db"
    return VectorStoreIndex(milvus.Milvus, connection_args={"uri": str(file)}, auto_id=False, **options)


STORES = {
    "InMemoryVectorStore": _in_memory,
    "Chroma": _chroma,
    "QdrantVectorStore": _qdrant,
    "PGVector": _pgvector,
    "PGVectorStore": _pgvectorstore,
    "Milvus": _milvus,
}
"""Each makes an empty index, given pytest's request and options of the index."""
