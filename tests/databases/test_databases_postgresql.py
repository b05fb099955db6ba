"""PostgreSQL is read, and not much of it: what a program may not do to the server."""

import datetime
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import pytest
from attacked import attacked
from cities import rewards
from rcr_trainer.data.examples import Example
from rcr_trainer.rewards.ours import make_reward
from rcr_trainer.rewards.reward import score

from langchain_rcr.databases import worker as query_worker
from langchain_rcr.databases.database import open_database
from langchain_rcr.errors import InputError, ProgramError
from langchain_rcr.programs import ProgramSpec


@pytest.fixture(scope="module")
def run(postgres_url):
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS city")
        connection.execute("CREATE TABLE city (name TEXT, people INT, area NUMERIC)")
        connection.execute("INSERT INTO city VALUES ('austin', 3, 0.10), ('boston', 2, 0.2)")
    with open_database(postgres_url, timeout_s=1, max_rows=5) as database:
        yield database


@pytest.fixture(scope="module")
def reward(run, postgres_url):
    return make_reward("execution", ProgramSpec(language="sql:postgres"), database=postgres_url)


def stat(process):
    """Parent of a process, and seconds of CPU time: its own, that of its children that have ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    user, system, of_children, in_system = (int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in fields[11:15])
    return int(fields[1]), user + system, of_children + in_system


def servers_cpu(url):
    """Seconds of CPU time that this run's own server has taken so far, with all its processes; 0 for another's."""
    import psycopg

    if "TEST_POSTGRES_URL" in os.environ:
        return 0.0

    with psycopg.connect(url) as connection:
        [own] = connection.execute("SELECT pg_backend_pid()").fetchone()
        server = stat(own)[0]
    total = sum(stat(server)[1:])
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile
            parent, seconds, _ = stat(folder.name)
            total += seconds if parent == server else 0
    return total


@pytest.fixture
def uninterruptible(postgres_url):
    """A query that the server can't interrupt, and what ends it; on another's server it computes until it ends."""
    if "TEST_POSTGRES_URL" in os.environ:
        yield "SELECT length(translate(repeat('a', 28000), repeat('b', 28000), ''))", lambda: None
        return
    # Not in pytest's folder, which pytest closes to other users.
    with tempfile.TemporaryDirectory(prefix="rcr-pipe-") as folder:
        pipe = Path(folder, "pipe")
        os.mkfifo(pipe)
        for path, mode in ((folder, 0o755), (pipe, 0o644)):
            Path(path).chmod(mode)
        # An error if nothing reads any more.
        yield f"SELECT pg_read_file('{pipe}')", lambda: os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


class TestPostgreSQL:
    def test_rows_come_back(self, run):
        assert run("SELECT name, area FROM city ORDER BY 1;") == [
            ("austin", Decimal("0.10")),
            ("boston", Decimal("0.2")),
        ]
        assert run("SELECT count(*) FROM city WHERE name LIKE 'a%'") == [(1,)]

    @pytest.mark.parametrize(
        "program",
        [
            "DELETE FROM city",
            "DROP TABLE city",
            "SELECT 1; DELETE FROM city",
            "SELECT 1; COMMIT; DELETE FROM city",
            "COMMIT",
            "WITH gone AS (DELETE FROM city RETURNING *) SELECT * FROM gone",
            "SET TRANSACTION READ WRITE",
            "COPY city TO '/tmp/x'",
            "SELECT set_config('transaction_read_only', 'off', false)",
            "SELECT name FROM",
            "SELECT * FROM nowhere",
            "SELECT generate_series(1, 6)",
            "SELECT pg_sleep(5)",
            "SELECT pg_terminate_backend(pg_backend_pid())",
            "",
            "SELECT 1 \x00",
        ],
    )
    def test_it_is_only_read(self, run, program):
        with pytest.raises(ProgramError):
            run(program)
        assert run("SELECT count(*) FROM city") == [(2,)]

    def test_an_error_quotes_the_program_alone(self, run):
        with pytest.raises(ProgramError) as caught:
            run("SELECT name,\n  age FROM city")
        shown = ['column "age" does not exist', "LINE 2:   age FROM city", " " * 10 + "^"]
        assert str(caught.value).splitlines()[:3] == shown
        with pytest.raises(ProgramError, match='near "DELETE"\nLINE 1: DELETE FROM city'):
            run("DELETE FROM city")

    def test_values_of_its_own_types(self, run):
        query = "SELECT date '2020-02-01', timestamp '2020-02-01 03:04:05.6', interval '1 day 2 s', '\\xff'::bytea, "
        query += "array[1.5, NULL], '{\"a\": [1]}'::jsonb, time '03:04', 'nan'::float8, '::1'::inet"
        values = [datetime.date(2020, 2, 1), datetime.datetime(2020, 2, 1, 3, 4, 5, 600_000)]
        values += [datetime.timedelta(days=1, seconds=2), b"\xff", [Decimal("1.5"), None], {"a": [1]}]
        [row] = run(query)
        assert row[:7] == (*values, datetime.time(3, 4))
        assert math.isnan(row[7])
        assert row[8] == "::1"

    def test_dates_and_times_that_python_lacks_are_text(self, run):
        query = "SELECT date 'infinity', timestamp '-infinity', timestamptz 'infinity', date '0044-03-15 BC', "
        query += "time '24:00', interval '178000000 years', array[date 'infinity', date '2020-02-01']"
        values = ("infinity", "-infinity", "infinity", "0044-03-15 BC", "24:00:00", "178000000 years")
        assert run(query) == [(*values, ["infinity", datetime.date(2020, 2, 1)])]

    @pytest.mark.slow
    def test_rows_of_gigabytes_and_time_limits_that_a_query_lifts(self, run, postgres_url):
        programs = [
            "SELECT repeat('x', 10000000) FROM generate_series(1, 4000)",
            "SELECT repeat('x', 100000000)",
            "SELECT pg_sleep(0.01), set_config('statement_timeout', '0', false) FROM generate_series(1, 500)",
            "SELECT set_config('statement_timeout', '0', false), count(*) FROM generate_series(1, 10000000000)",
            "SELECT sum(length(md5(a::text || b::text))) FROM generate_series(1, 99999) a, generate_series(1, 99999) b",
        ]
        limit = 0.8
        for program in programs:
            before = servers_cpu(postgres_url)
            [told] = attacked(postgres_url, limit, [program])
            assert isinstance(told["rows"], str), program
            assert told["alive"]
            assert told["cpu"] + servers_cpu(postgres_url) - before <= 2 * limit, program
            assert told["kilobytes"] <= (1 << 29) / 1024

    @pytest.mark.slow
    def test_what_keeps_within_the_limits_comes_back(self, run, postgres_url):
        slow = "SELECT pg_sleep(0.001), set_config('statement_timeout', '0', false), n FROM generate_series(1, 250) n"
        with open_database(postgres_url, timeout_s=30) as database:
            assert [row[2] for row in database(slow)] == list(range(1, 251))
            assert database("SELECT repeat('x', 1000000) FROM generate_series(1, 4)") == [("x" * 1_000_000,)] * 4

    def test_a_copy_has_processes_of_its_own(self, run):
        with pickle.loads(pickle.dumps(run)) as other:
            assert other("SELECT 1") == [(1,)]

    def test_advisory_locks_are_released(self, run, postgres_url):
        psycopg = pytest.importorskip("psycopg")
        run("SELECT pg_advisory_lock(7)")
        with psycopg.connect(postgres_url, options="-c statement_timeout=20000") as connection:
            connection.execute("SELECT pg_advisory_lock(7)")

    def test_a_session_setting_does_not_outlive_its_program(self, run):
        run("SELECT set_config('statement_timeout', '0', false)")
        now = "SELECT current_setting('statement_timeout'), current_setting('transaction_read_only')"
        assert run(now) == [("1s", "on")]

    def test_a_connection_that_was_lost_meanwhile_is_renewed(self, run, postgres_url):
        psycopg = pytest.importorskip("psycopg")
        [(number,)] = run("SELECT pg_backend_pid()")
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(%s, 5000)", (number,))
        assert run("SELECT count(*) FROM city") == [(2,)]
        assert run("SELECT pg_backend_pid()") != [(number,)]

    def test_options_in_the_address_stay_but_for_the_limits(self, run, postgres_url):
        own = "-c%20search_path%3Dpg_catalog%20-c%20default_transaction_read_only%3Doff"
        executor = open_database(f"{postgres_url}{'&' if '?' in postgres_url else '?'}options={own}", timeout_s=1)
        now = "SELECT current_setting('search_path'), current_setting('transaction_read_only')"
        assert executor(now) == [("pg_catalog", "on")]

    def test_it_tells_right_answers_from_wrong_ones(self, reward):
        gold = "SELECT name FROM city WHERE area < 0.15"
        answers = [
            "SELECT name\nFROM city\nORDER BY area\nLIMIT 1",
            "SELECT name FROM city",
            "SELECT area FROM city",
            None,
        ]
        assert rewards(reward, *[(answer, gold) for answer in answers]) == [1.0, 0.0, 0.0, 0.0]
        assert rewards(reward, ("SELECT 1", "SELECT * FROM nowhere")) == [None]

    @pytest.mark.skipif("TEST_POSTGRES_URL" in os.environ, reason="a given server's roles are left alone")
    @pytest.mark.slow
    def test_a_role_may_have_as_many_connections_as_there_are_processes(self, run, postgres_url):
        """The server counts a connection until its process has ended, a moment after the client has closed it."""
        import psycopg
        from psycopg.conninfo import make_conninfo

        with psycopg.connect(postgres_url, autocommit=True) as admin:
            admin.execute("CREATE ROLE single LOGIN CONNECTION LIMIT 1")
            try:
                with open_database(make_conninfo(postgres_url, user="single"), max_processes=1) as database:
                    assert [database(f"SELECT {n}") for n in range(400)] == [[(n,)] for n in range(400)]
            finally:
                admin.execute("DROP ROLE single")

    def test_no_connection_says_so_without_the_password(self):
        with pytest.raises(InputError, match="no connection to the PostgreSQL database") as error:
            open_database("postgresql://nobody:secret@127.0.0.1:1/x")
        assert "secret" not in str(error.value)

    @pytest.mark.parametrize(
        "value",
        [
            *("10::numeric ^ 5000", "-(10::numeric ^ 5000) + 0.5", "(repeat('[', 900) || repeat(']', 900))::json"),
            *("(repeat('[', 9000) || repeat(']', 9000))::json", "('[' || repeat('1', 5000) || ']')::json"),
            *("'infinity'::timestamp", "timestamp '20000-01-01'", "date '0044-03-15 BC'", "time '24:00'"),
            *("interval '178000000 years'", '\'{"a": "\\ud800"}\'::json', "'NaN'::numeric", "'[1,3)'::int4range"),
            *("row(1, 'a')", "array[[1, 2], [3, NULL]]", "5::money", "B'101'", "gen_random_uuid()", "point '(1, 2)'"),
        ],
    )
    def test_no_value_stops_a_run(self, reward, value):
        example = Example("7", "q", "SELECT 1")
        assert list(score(reward, [f"SELECT {value}"], [example], [[]])) == [0.0]
        assert rewards(reward, ("SELECT 1", f"SELECT {value}")) in ([0.0], [None])

    @pytest.mark.slow
    def test_queries_that_the_server_goes_on_computing_are_bounded(self, run, postgres_url, uninterruptible):
        endless, end = uninterruptible
        with open_database(postgres_url, timeout_s=0.2, max_processes=1) as database:
            with pytest.raises(ProgramError, match=r"longer than 0\.2 s"):
                database(endless)
            begin = time.monotonic()
            with pytest.raises(InputError, match=r"still computes 1 queries that took longer than 0\.2 s: try again"):
                database("SELECT 1")
            assert time.monotonic() - begin < 5
            end()
            while time.monotonic() - begin < 120:  # until that one has ended
                with suppress(InputError):
                    assert database("SELECT 1") == [(1,)]
                    break
                time.sleep(0.1)
            assert database("SELECT 2") == [(2,)]
        # A run waits.
        with open_database(postgres_url, timeout_s=0.2, max_processes=1, patience_s=120) as database:
            with pytest.raises(ProgramError):
                database(endless)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(database, "SELECT 1")
                assert not wait([waiting], timeout=1).done
                end()
                assert waiting.result() == [(1,)]

    @pytest.mark.slow
    def test_psycopg_is_found_where_this_process_finds_it(self, run, postgres_url):
        """Such as in a folder of PYTHONPATH alone: the other process doesn't see that variable."""
        code = "import sys; from langchain_rcr import open_database; print(open_database(sys.argv[1])('SELECT 7'))"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-S", "-c", code, postgres_url]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("[(7,)]\n", "")

    def test_a_query_is_cancelled_where_the_server_keeps_no_limit(self, run, postgres_url, monkeypatch):
        """A pooler, for one, may not pass it on."""
        import psycopg

        connect = psycopg.connect

        def without_limits(url, **more):
            connection = connect(url, **more)
            connection.execute = lambda statement: None
            return connection

        monkeypatch.setattr(psycopg, "connect", without_limits)
        monkeypatch.setattr(query_worker, "say", lambda message: None)
        begin = time.monotonic()
        with pytest.raises(query_worker.RefusedError, match=r"longer than 0\.3 s"):
            list(query_worker.PostgreSQL(postgres_url, 0.3)("SELECT pg_sleep(5)"))
        assert time.monotonic() - begin < 3

    @pytest.mark.parametrize(("given", "used"), [({}, 10), ({"connect_timeout": 50}, "50")])
    def test_the_address_says_how_long_a_connection_may_take(self, run, postgres_url, monkeypatch, given, used):
        """A server that was asleep takes its time."""
        import psycopg
        from psycopg.conninfo import make_conninfo

        connect, waited = psycopg.connect, []
        monkeypatch.setattr(psycopg, "connect", lambda url, **more: waited.append(more) or connect(url, **more))
        query_worker.PostgreSQL(make_conninfo(postgres_url, **given), 5.0)
        assert waited == [{"connect_timeout": used}]

    def test_limits_hold_where_a_pooler_takes_no_options(self, run, postgres_url, monkeypatch):
        """PgBouncer refuses them, unless told to ignore them."""
        import psycopg

        connect = psycopg.connect

        def through_a_pooler(url, **more):
            assert "options" not in more
            return connect(url, **more)

        monkeypatch.setattr(psycopg, "connect", through_a_pooler)
        monkeypatch.setattr(query_worker, "say", lambda message: None)
        with pytest.raises(query_worker.RefusedError, match="in a read-only transaction"):
            list(query_worker.PostgreSQL(postgres_url, 5.0)("SELECT lo_create(0)"))
        with pytest.raises(query_worker.RefusedError, match="must be set before any query"):
            list(query_worker.PostgreSQL(postgres_url, 5.0)("SELECT set_config('transaction_read_only', 'off', false)"))
        limits = "SELECT current_setting('statement_timeout'), current_setting('lock_timeout')"
        assert list(query_worker.PostgreSQL(postgres_url, 5.0)(limits)) == [[("5s", "2500ms")]]

    def test_a_lock_of_the_server_is_no_fault_of_the_program(self, run, postgres_url):
        import psycopg

        with psycopg.connect(postgres_url) as connection:
            connection.execute("LOCK TABLE city")
            connection.execute("SELECT pg_advisory_lock(8)")
            with pytest.raises(InputError, match="database can't be read: canceling statement due to lock timeout"):
                run("SELECT count(*) FROM city")
            with pytest.raises(ProgramError, match="lock timeout"):
                run("SELECT pg_advisory_lock(8)")
        assert run("SELECT count(*) FROM city") == [(2,)]

    @pytest.mark.slow
    def test_a_query_that_an_administrator_ended_is_run_again(self, run, postgres_url):
        with open_database(postgres_url, timeout_s=20) as database, ThreadPoolExecutor(1) as thread:
            found = thread.submit(database, "SELECT pg_sleep(1), 7")
            end_the_query(postgres_url)
            assert found.result() == [("", 7)]

    def test_a_query_that_a_replica_cancels_is_run_again(self, run, postgres_url, monkeypatch):
        import psycopg

        with psycopg.connect(postgres_url, autocommit=True) as connection:
            body = "BEGIN RAISE 'canceling statement due to conflict with recovery' USING ERRCODE = '40001'; END"
            connection.execute(f"CREATE FUNCTION conflict() RETURNS int LANGUAGE plpgsql AS $${body}$$")
        with pytest.raises(ProgramError, match="conflict with recovery"):
            run("SELECT conflict()")
        started = []
        monkeypatch.setattr(query_worker, "say", started.append)
        with pytest.raises(query_worker.RefusedError, match="conflict with recovery"):
            query_worker.again(lambda: list(query_worker.PostgreSQL(postgres_url, 5.0)("SELECT conflict()")))
        assert len(started) == 2

    @pytest.mark.slow
    def test_a_server_that_is_lost_is_no_fault_of_the_program(self, run, postgres_url, tmp_path_factory):
        from psycopg.conninfo import conninfo_to_dict, make_conninfo

        host = conninfo_to_dict(postgres_url)["host"]
        if not host.startswith("/"):
            pytest.skip("it isn't reached through a file")
        socket = tmp_path_factory.mktemp("s") / ".s.PGSQL.5432"
        socket.symlink_to(Path(host) / socket.name)
        address = make_conninfo(postgres_url, host=str(socket.parent))
        with open_database(address, timeout_s=20) as database, ThreadPoolExecutor(1) as thread:
            found = thread.submit(database, "SELECT pg_sleep(3)")
            wait_for_the_query(postgres_url)
            socket.unlink()
            end_the_query(postgres_url)
            with pytest.raises(InputError, match="no connection to the PostgreSQL database"):
                found.result()


def wait_for_the_query(url, what="pid"):
    """The numbers of the backends that run a program."""
    import psycopg

    active = (
        f"SELECT {what} FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'FETCH%' AND wait_event = 'PgSleep'"
    )
    with psycopg.connect(url, autocommit=True) as connection:
        for _ in range(200):
            if found := connection.execute(active).fetchall():
                return found
            time.sleep(0.05)
    raise AssertionError("no query began")


def end_the_query(url):
    wait_for_the_query(url, "pg_terminate_backend(pid)")
