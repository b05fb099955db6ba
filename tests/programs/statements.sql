#
SELECT name, population FROM city WHERE population > 500000 ORDER BY population DESC LIMIT 10

#
WITH recent AS (SELECT * FROM orders WHERE placed >= '2024-01-01'), best AS (SELECT customer_id, SUM(total) AS spent FROM recent GROUP BY customer_id) SELECT c.name, b.spent FROM customers AS c JOIN best AS b ON b.customer_id = c.id

#
SELECT department, AVG(salary) FROM employee GROUP BY department HAVING COUNT(*) > 5 -- only large ones

#
SELECT DISTINCT a.title FROM album a /* the join table */ INNER JOIN track t USING (album_id) WHERE t.length BETWEEN 120 AND 240

#
SELECT name FROM river WHERE length = (SELECT MAX(length) FROM river WHERE traverse IN ('texas', 'iowa'))

#
SELECT id FROM a UNION ALL SELECT id FROM b EXCEPT SELECT id FROM c INTERSECT SELECT id FROM d

#
SELECT CASE WHEN score >= 90 THEN 'A' WHEN score >= 80 THEN 'B' ELSE 'C' END AS grade, COUNT(*) FROM result GROUP BY 1

#
INSERT INTO archive (id, body) SELECT id, body FROM message WHERE sent < DATE '2020-01-01'

#
UPDATE account SET balance = balance - 100, touched = CURRENT_TIMESTAMP WHERE id = 7 AND balance >= 100

#
DELETE FROM session WHERE expires < CURRENT_DATE OR user_id IS NULL

#
CREATE TABLE invoice (id INT PRIMARY KEY, customer INT NOT NULL REFERENCES customer (id), total DECIMAL(10, 2) DEFAULT 0, CHECK (total >= 0))

#
SELECT * FROM {{ ref('stg_orders') }} WHERE status = '{{ var("status") }}' AND updated_at > {{ since }}

#
{{ config(materialized='table') }}
SELECT customer_id, COUNT(*) AS orders FROM {{ source('shop', 'orders') }} GROUP BY 1

#
{% if is_incremental() %}
SELECT id, updated_at FROM events WHERE updated_at > (SELECT MAX(updated_at) FROM {{ this }})
{% endif %}

#
SELECT name FROM person WHERE age > :minimum AND city = :city

#
SELECT name FROM person WHERE age > ? AND NOT EXISTS (SELECT 1 FROM ban WHERE ban.person_id = person.id)

#
SELECT t.name, RANK() OVER (PARTITION BY t.region ORDER BY t.sales DESC) AS place FROM totals AS t

#
EXPLAIN SELECT * FROM city WHERE name LIKE 'San %'

# sqlite
SELECT [first name], "last name", `order` FROM [people list] WHERE rowid < 100

# sqlite
SELECT strftime('%Y', placed) AS year, COUNT(*) FROM orders GROUP BY year ORDER BY year

# sqlite
WITH RECURSIVE chain(id, boss, depth) AS (SELECT id, boss, 0 FROM staff WHERE boss IS NULL UNION ALL SELECT s.id, s.boss, depth + 1 FROM staff AS s JOIN chain ON s.boss = chain.id) SELECT MAX(depth) FROM chain

# sqlite
INSERT INTO setting (name, value) VALUES ('a', 1) ON CONFLICT (name) DO UPDATE SET value = excluded.value

# sqlite
INSERT OR REPLACE INTO cache VALUES (?1, ?2)

# sqlite
SELECT value FROM thing, json_each(thing.tags) WHERE value GLOB 'a*'

# sqlite
SELECT j ->> '$.name', group_concat(x, '; ') FROM t GROUP BY 1

# sqlite
SELECT DISTINCT T1.fname FROM student AS T1 JOIN has_pet AS T2 ON T1.stuid = T2.stuid JOIN pets AS T3 ON T3.petid = T2.petid WHERE T3.pettype = 'cat' OR T3.pettype = 'dog'

# sqlite
PRAGMA table_info(city)

# sqlite
SELECT IIF(a > b, a, b), ifnull(c, 0), a || ' ' || b FROM t WHERE c IS NOT d

# postgres
SELECT u.id, u.data ->> 'email' AS email FROM users u WHERE u.data @> '{"active": true}' AND u.tags && ARRAY['a', 'b']

# postgres
SELECT DISTINCT ON (customer_id) customer_id, placed_at, total FROM orders ORDER BY customer_id, placed_at DESC

# postgres
SELECT date_trunc('month', created_at) AS month, COUNT(*) FILTER (WHERE status = 'paid') AS paid FROM invoice GROUP BY 1

# postgres
INSERT INTO stock (sku, n) VALUES ($1, $2) ON CONFLICT (sku) DO UPDATE SET n = stock.n + EXCLUDED.n RETURNING id, n

# postgres
SELECT p.name, x.amount FROM product p LEFT JOIN LATERAL (SELECT amount FROM price WHERE price.product = p.id ORDER BY since DESC LIMIT 1) x ON TRUE

# postgres
SELECT generate_series(1, 10) AS n, now() - INTERVAL '3 days' AS since

# postgres
UPDATE employee SET salary = salary * 1.05 FROM department WHERE department.id = employee.department_id AND department.name = 'Sales'

# postgres
DELETE FROM token USING account WHERE token.account_id = account.id AND account.closed RETURNING token.id

# postgres
SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY income) FROM household

# postgres
SELECT region, product, SUM(amount) FROM sale GROUP BY GROUPING SETS ((region, product), (region), ())

# postgres
SELECT id, to_tsvector('english', body) @@ to_tsquery('cat & dog') FROM page

# postgres
WITH moved AS (DELETE FROM inbox WHERE done RETURNING *) INSERT INTO archive SELECT * FROM moved

# postgres
SELECT name FROM film WHERE title ILIKE '%love%' AND release_year::int BETWEEN 1990 AND 2000

# postgres
SELECT array_agg(name ORDER BY name) FROM tag GROUP BY kind

# postgres
CREATE INDEX CONCURRENTLY idx_orders_placed ON orders USING btree (placed_at DESC)

# postgres
SELECT * FROM unnest(ARRAY[1, 2, 3]) WITH ORDINALITY AS t(value, place)

# postgres
MERGE INTO target t USING source s ON t.id = s.id WHEN MATCHED THEN UPDATE SET v = s.v WHEN NOT MATCHED THEN INSERT (id, v) VALUES (s.id, s.v)

# mysql
SELECT `name`, `group` FROM `user accounts` WHERE `group` = 'admin' LIMIT 5, 10

# mysql
INSERT INTO hits (page, n) VALUES ('/', 1) ON DUPLICATE KEY UPDATE n = n + 1

# mysql
SELECT GROUP_CONCAT(DISTINCT name ORDER BY name SEPARATOR ', ') FROM author GROUP BY country

# mysql
SELECT DATE_FORMAT(placed, '%Y-%m') AS month, SUM(total) FROM orders WHERE placed > DATE_SUB(NOW(), INTERVAL 6 MONTH) GROUP BY month

# mysql
SELECT * FROM product WHERE MATCH(title, body) AGAINST ('laptop' IN BOOLEAN MODE)

# mysql
SELECT IF(a > 1, 'x', 'y'), IFNULL(b, 0) FROM t STRAIGHT_JOIN u ON t.id = u.id

# mysql
REPLACE INTO setting (k, v) VALUES ('theme', 'dark')

# mysql
UPDATE a JOIN b ON a.id = b.a_id SET a.total = b.total WHERE b.done = 1

# mysql
SELECT JSON_EXTRACT(doc, '$.a'), doc->>'$.b' FROM docs # a trailing comment

# mysql
SELECT @rank := @rank + 1 AS place, name FROM player ORDER BY score DESC

# mysql
SHOW TABLES LIKE 'ord%'

# bigquery
SELECT * EXCEPT (secret) REPLACE (UPPER(name) AS name) FROM `my-project.shop.customers`

# bigquery
SELECT user_id, item FROM events, UNNEST(items) AS item WITH OFFSET AS position WHERE position < 3

# bigquery
SELECT user_id, event, ROW_NUMBER() OVER (PARTITION BY user_id ORDER BY at DESC) AS n FROM events QUALIFY n = 1

# bigquery
SELECT ARRAY_AGG(STRUCT(id, name) ORDER BY id LIMIT 3) FROM t

# bigquery
SELECT APPROX_COUNT_DISTINCT(user_id), SAFE_DIVIDE(a, b), TIMESTAMP_TRUNC(at, DAY) FROM t GROUP BY 3

# bigquery
SELECT * FROM (SELECT product, sales, quarter FROM produce) PIVOT (SUM(sales) FOR quarter IN ('Q1', 'Q2', 'Q3', 'Q4'))

# bigquery
SELECT * FROM t FOR SYSTEM_TIME AS OF TIMESTAMP_SUB(CURRENT_TIMESTAMP(), INTERVAL 1 HOUR)

# bigquery
SELECT name FROM people WHERE birthday > @since AND REGEXP_CONTAINS(name, r'^A.*')

# bigquery
MERGE dataset.inventory AS t USING dataset.arrivals AS s ON t.product = s.product WHEN MATCHED THEN UPDATE SET quantity = t.quantity + s.quantity WHEN NOT MATCHED THEN INSERT (product, quantity) VALUES (product, quantity)

# bigquery
CREATE OR REPLACE TABLE d.t PARTITION BY DATE(at) CLUSTER BY user_id AS SELECT * FROM d.raw

# bigquery
SELECT DATE_DIFF(CURRENT_DATE(), birthday, YEAR), SAFE_CAST(x AS INT64), GENERATE_ARRAY(1, 5) FROM p

# bigquery
WITH t AS (SELECT [1, 2, 3] AS xs) SELECT x FROM t CROSS JOIN UNNEST(t.xs) AS x

# snowflake
SELECT id, v:address.city::string AS city FROM raw QUALIFY ROW_NUMBER() OVER (PARTITION BY id ORDER BY loaded DESC) = 1

# snowflake
SELECT f.value:name::varchar FROM docs, LATERAL FLATTEN(input => docs.body:items) f

# snowflake
SELECT * FROM monthly PIVOT (SUM(amount) FOR month IN ('JAN', 'FEB', 'MAR')) AS p ORDER BY empid

# snowflake
SELECT * FROM orders SAMPLE (10) WHERE placed >= DATEADD(day, -7, CURRENT_DATE())

# snowflake
SELECT LISTAGG(name, ', ') WITHIN GROUP (ORDER BY name) FROM t GROUP BY g

# snowflake
MERGE INTO t USING s ON t.id = s.id WHEN MATCHED AND s.deleted THEN DELETE WHEN MATCHED THEN UPDATE SET t.v = s.v WHEN NOT MATCHED THEN INSERT (id, v) VALUES (s.id, s.v)

# snowflake
SELECT $1, $2 FROM @stage/file.csv (FILE_FORMAT => my_format)

# snowflake
SELECT TOP 5 name FROM customer ORDER BY spent DESC

# snowflake
SELECT * FROM t AT (OFFSET => -60 * 5)

# snowflake
SELECT employee, manager, LEVEL FROM staff START WITH manager IS NULL CONNECT BY manager = PRIOR employee

# snowflake
SELECT IFF(a > 1, 'x', 'y'), NVL(b, 0), TRY_TO_NUMBER(c), ZEROIFNULL(d) FROM t

# snowflake
COPY INTO t FROM @stage PATTERN = '.*csv'

# snowflake
SELECT DATEDIFF(month, a, b), TO_TIMESTAMP_NTZ(c), OBJECT_CONSTRUCT('k', v) FROM t

# redshift
SELECT DATEADD(day, 7, placed), GETDATE(), NVL(total, 0) FROM orders WHERE placed > SYSDATE - 30

# redshift
CREATE TABLE sales (id INT, at TIMESTAMP) DISTKEY (id) SORTKEY (at)

# redshift
SELECT LISTAGG(name, ',') WITHIN GROUP (ORDER BY name) FROM person GROUP BY city

# redshift
SELECT TOP 10 venue, COUNT(*) FROM event GROUP BY venue ORDER BY 2 DESC

# redshift
SELECT APPROXIMATE COUNT(DISTINCT user_id) FROM visit

# redshift
UNLOAD ('SELECT * FROM t') TO 's3://bucket/t' IAM_ROLE 'arn'

# tsql
SELECT TOP 10 WITH TIES [Order ID], [Total] FROM [dbo].[Order Details] ORDER BY [Total] DESC

# tsql
SELECT name FROM people ORDER BY name OFFSET 10 ROWS FETCH NEXT 5 ROWS ONLY

# tsql
SELECT * FROM (SELECT year, quarter, amount FROM sales) AS s PIVOT (SUM(amount) FOR quarter IN ([Q1], [Q2], [Q3], [Q4])) AS p

# tsql
SELECT ISNULL(a, 0), LEN(b), GETDATE(), DATEADD(month, 1, c), CONVERT(VARCHAR(10), d, 120) FROM t

# tsql
SELECT c.name, o.total FROM customer c CROSS APPLY (SELECT TOP 1 total FROM orders WHERE orders.customer = c.id ORDER BY placed DESC) AS o

# tsql
MERGE INTO stock AS t USING delivery AS s ON t.sku = s.sku WHEN MATCHED THEN UPDATE SET n = t.n + s.n WHEN NOT MATCHED BY TARGET THEN INSERT (sku, n) VALUES (s.sku, s.n) WHEN NOT MATCHED BY SOURCE THEN DELETE;

# tsql
DECLARE @since DATE = '2024-01-01'; SELECT * FROM orders WHERE placed >= @since

# tsql
SELECT STRING_AGG(name, ', ') WITHIN GROUP (ORDER BY name) FROM tag GROUP BY kind

# tsql
SELECT * FROM t WITH (NOLOCK) WHERE a = 1 OPTION (MAXDOP 2)

# tsql
SELECT name, value FROM OPENJSON(@json) WITH (name NVARCHAR(50) '$.name', value INT '$.value')

# tsql
SELECT id, body FROM message FOR XML PATH('row')

# tsql
UPDATE e SET e.salary = e.salary * 1.1 FROM employee AS e INNER JOIN department AS d ON d.id = e.department WHERE d.name = 'R&D'

# tsql
EXEC sp_rename 'old', 'new'

# oracle
SELECT employee_id, LEVEL FROM employees START WITH manager_id IS NULL CONNECT BY PRIOR employee_id = manager_id ORDER SIBLINGS BY last_name

# oracle
SELECT * FROM (SELECT a.*, ROWNUM AS n FROM (SELECT * FROM emp ORDER BY hired) a WHERE ROWNUM <= 20) WHERE n > 10

# oracle
SELECT NVL(commission, 0), DECODE(grade, 1, 'low', 2, 'high', 'none'), SYSDATE FROM dual

# oracle
SELECT d.name, e.name FROM dept d, emp e WHERE d.id = e.dept_id (+)

# oracle
SELECT LISTAGG(name, ';') WITHIN GROUP (ORDER BY name) FROM emp GROUP BY dept_id

# oracle
SELECT TO_CHAR(hired, 'YYYY-MM'), COUNT(*) FROM emp WHERE hired > TO_DATE('2020-01-01', 'YYYY-MM-DD') GROUP BY TO_CHAR(hired, 'YYYY-MM')

# oracle
MERGE INTO bonus b USING (SELECT id, pay FROM emp WHERE dept = 80) s ON (b.id = s.id) WHEN MATCHED THEN UPDATE SET b.pay = b.pay + s.pay WHEN NOT MATCHED THEN INSERT (b.id, b.pay) VALUES (s.id, s.pay)

# oracle
SELECT * FROM sales PIVOT (SUM(amount) FOR region IN ('N' AS north, 'S' AS south))

# oracle
SELECT name FROM emp FETCH FIRST 5 ROWS ONLY

# oracle
SELECT a FROM t WHERE b = :b AND REGEXP_LIKE(c, '^x', 'i') MINUS SELECT a FROM u

# duckdb
SELECT * EXCLUDE (secret) FROM 'data/*.parquet' WHERE year = 2024

# duckdb
FROM orders SELECT customer, SUM(total) GROUP BY ALL ORDER BY ALL

# duckdb
SELECT unnest([1, 2, 3]) AS n, {'a': 1, 'b': 'x'} AS s, list_transform([1, 2], x -> x + 1)

# duckdb
PIVOT cities ON year USING SUM(population) GROUP BY country

# duckdb
UNPIVOT monthly ON jan, feb, mar INTO NAME month VALUE sales

# duckdb
SELECT name, amount FROM t QUALIFY row_number() OVER (PARTITION BY name ORDER BY amount DESC) <= 2

# duckdb
SELECT a.at, a.price, b.rate FROM trades a ASOF JOIN rates b ON a.at >= b.at

# duckdb
SELECT COLUMNS('sales_.*') FROM t USING SAMPLE 10%

# duckdb
SELECT strptime('2024-01-01', '%Y-%m-%d'), date_diff('day', a, b), arg_max(name, score) FROM t

# duckdb
SELECT * FROM read_csv('a.csv', header = true, delim = ';')

# clickhouse
SELECT user_id, uniq(page) FROM visits PREWHERE day = today() GROUP BY user_id WITH TOTALS

# clickhouse
SELECT arrayJoin([1, 2, 3]) AS x, quantile(0.9)(latency) FROM log FINAL SAMPLE 0.1

# clickhouse
SELECT name FROM t ORDER BY score DESC LIMIT 2 BY region

# clickhouse
SELECT countIf(status = 500), sumIf(bytes, method = 'GET'), toStartOfHour(at) AS h FROM log GROUP BY h

# clickhouse
SELECT a.id FROM a ANY LEFT JOIN b ON a.id = b.id

# clickhouse
SELECT * FROM t ARRAY JOIN tags AS tag WHERE tag = 'new'

# clickhouse
CREATE TABLE log (at DateTime, code UInt16) ENGINE = MergeTree ORDER BY at

# clickhouse
SELECT x FROM t WHERE id = {id: UInt32} SETTINGS max_threads = 4

# clickhouse
SELECT argMax(price, at), groupArray(10)(name) FROM q FORMAT JSON

# spark
SELECT id, tag FROM posts LATERAL VIEW EXPLODE(tags) exploded AS tag

# spark
SELECT /*+ BROADCAST(d) */ e.name FROM employee e JOIN department d ON e.dept = d.id

# spark
SELECT * FROM t TABLESAMPLE (5 PERCENT)

# spark
SELECT name FROM a LEFT ANTI JOIN b ON a.id = b.id

# spark
SELECT transform(xs, x -> x + 1), filter(xs, x -> x > 2), collect_list(name) FROM t

# spark
INSERT OVERWRITE TABLE sales PARTITION (year = 2024) SELECT * FROM staged

# spark
SELECT date_format(at, 'yyyy-MM'), from_unixtime(ts), get_json_object(body, '$.a') FROM t

# spark
SELECT * FROM sales PIVOT (SUM(amount) FOR quarter IN (1, 2, 3, 4))

# spark
CACHE TABLE hot AS SELECT * FROM events WHERE day = current_date()

# spark2
SELECT a, COUNT(DISTINCT b) FROM t GROUP BY a WITH CUBE

# spark2
SELECT stack(2, 'a', a, 'b', b) AS (name, value) FROM t

# databricks
SELECT raw:store.basket[0].price::double FROM events

# databricks
MERGE INTO people USING changes ON people.id = changes.id WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *

# databricks
SELECT * FROM t VERSION AS OF 12

# databricks
OPTIMIZE events ZORDER BY (at)

# databricks
SELECT id FROM t QUALIFY RANK() OVER (ORDER BY score DESC) <= 3

# databricks
CREATE TABLE t (id BIGINT GENERATED ALWAYS AS IDENTITY, at DATE) USING DELTA PARTITIONED BY (at)

# hive
SELECT word, COUNT(1) FROM docs LATERAL VIEW explode(split(line, ' ')) w AS word GROUP BY word

# hive
SELECT * FROM src DISTRIBUTE BY key SORT BY key, value

# hive
INSERT INTO TABLE t PARTITION (ds = '2024-01-01') SELECT id, name FROM staged

# hive
CREATE EXTERNAL TABLE log (line STRING) PARTITIONED BY (ds STRING) STORED AS PARQUET LOCATION '/data/log'

# hive
SELECT name FROM t WHERE name RLIKE '^a' CLUSTER BY name

# presto
SELECT n, x FROM t CROSS JOIN UNNEST(numbers, names) WITH ORDINALITY AS u (n, x, i)

# presto
SELECT approx_distinct(user_id), date_diff('day', a, b), element_at(m, 'k') FROM t

# presto
SELECT TRY(CAST(x AS BIGINT)), reduce(xs, 0, (s, x) -> s + x, s -> s) FROM t

# presto
SELECT * FROM orders TABLESAMPLE BERNOULLI (10)

# trino
SELECT json_query(doc, 'lax $.a'), listagg(name, ',') WITHIN GROUP (ORDER BY name) FROM t GROUP BY 1

# trino
SELECT * FROM trades MATCH_RECOGNIZE (PARTITION BY symbol ORDER BY at MEASURES A.price AS start ONE ROW PER MATCH PATTERN (A B+) DEFINE B AS price < PREV(price))

# trino
SELECT id FROM t FETCH FIRST 3 ROWS WITH TIES

# trino
MERGE INTO accounts t USING updates s ON t.id = s.id WHEN MATCHED THEN UPDATE SET amount = s.amount WHEN NOT MATCHED THEN INSERT (id, amount) VALUES (s.id, s.amount)

# athena
SELECT request_ip, COUNT(*) FROM "logs"."alb" WHERE day = '2024/01/01' GROUP BY request_ip

# athena
CREATE EXTERNAL TABLE t (a INT) STORED AS PARQUET LOCATION 's3://b/t/'

# athena
UNLOAD (SELECT * FROM t) TO 's3://b/out/' WITH (format = 'PARQUET')

# teradata
SELECT TOP 5 name FROM emp QUALIFY RANK() OVER (ORDER BY salary DESC) <= 5

# teradata
SEL name FROM emp WHERE hired BETWEEN DATE '2020-01-01' AND CURRENT_DATE

# teradata
CREATE MULTISET VOLATILE TABLE t AS (SELECT * FROM s) WITH DATA PRIMARY INDEX (id) ON COMMIT PRESERVE ROWS

# teradata
SELECT a, RANDOM(1, 10) FROM t SAMPLE 100

# doris
SELECT DATE_TRUNC(at, 'month'), BITMAP_UNION_COUNT(users) FROM t GROUP BY 1

# doris
SELECT `k`, SUM(`v`) FROM `db`.`t` GROUP BY `k` ORDER BY 2 DESC LIMIT 3

# starrocks
SELECT city, SUM(pv) OVER (PARTITION BY city ORDER BY day ROWS BETWEEN 2 PRECEDING AND CURRENT ROW) FROM visits

# starrocks
SELECT unnest FROM t, UNNEST(SPLIT(tags, ','))

# drill
SELECT t.`name`, FLATTEN(t.`orders`) FROM dfs.`/data/c.json` AS t

# drill
SELECT CAST(columns[0] AS INT) FROM dfs.`/a.csv` LIMIT 5

# druid
SELECT TIME_FLOOR(__time, 'PT1H'), SUM(clicks) FROM ads WHERE __time >= CURRENT_TIMESTAMP - INTERVAL '1' DAY GROUP BY 1

# druid
SELECT channel, APPROX_COUNT_DISTINCT(user) FROM wiki GROUP BY channel

# dremio
SELECT a, CONVERT_FROM(b, 'json') FROM space.folder.t

# dremio
SELECT name FROM "My Space"."My Table" WHERE a IN (1, 2)

# dune
SELECT block_time, VARBINARY_TO_UINT256(data) FROM ethereum.logs WHERE contract_address = 0xdac17f958d2ee523a2206206994597c13d831ec7

# dune
SELECT date_trunc('day', block_time), SUM(value / 1e18) FROM ethereum.transactions GROUP BY 1

# materialize
CREATE MATERIALIZED VIEW v AS SELECT auction_id, MAX(amount) FROM bids GROUP BY auction_id

# materialize
SELECT id FROM t WHERE at > mz_now() - INTERVAL '1 hour'

# risingwave
CREATE MATERIALIZED VIEW m AS SELECT window_start, COUNT(*) FROM TUMBLE(events, at, INTERVAL '1' MINUTE) GROUP BY window_start

# risingwave
SELECT v1, SUM(v2) FROM t GROUP BY v1

# tableau
SELECT COUNTD([Customer ID]), IF [Sales] > 100 THEN 'big' ELSE 'small' END FROM [Orders]

# tableau
SELECT COUNT(DISTINCT [a]) FROM [t]

# prql
from employees
filter start_date > @2021-01-01
take 10

# prql
from tracks
select {title, length}

# singlestore
SELECT JSON_EXTRACT_STRING(doc, 'a'), `b`:>INT FROM t

# singlestore
SELECT name, TIME_BUCKET('1h', at) FROM m GROUP BY 1, 2

# exasol
SELECT GROUP_CONCAT(name ORDER BY name SEPARATOR ';') FROM t GROUP BY k

# exasol
SELECT a FROM t WHERE b REGEXP_LIKE '.*x.*' LIMIT 5

# fabric
SELECT TOP (5) [name] FROM [dbo].[city] ORDER BY [name]

# fabric
SELECT CAST(a AS DATETIME2(6)) FROM t

# solr
SELECT id, title FROM books WHERE author = 'x' ORDER BY score DESC LIMIT 5

# solr
SELECT author, COUNT(*) FROM books GROUP BY author

# dax
EVALUATE FILTER(sales, sales[amount] > 10)

#
SELECT a.name, COALESCE(b.total, 0) FROM a LEFT OUTER JOIN b ON a.id = b.a_id AND b.year = 2024 WHERE a.name IS NOT NULL

#
SELECT x.n, SUM(x.n) OVER (ORDER BY x.at ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS running FROM x

#
SELECT name FROM supplier WHERE NOT name LIKE '%ltd' AND (city = 'Bonn' OR city = 'Graz') AND price / amount > 0.5

#
ALTER TABLE customer ADD COLUMN nickname VARCHAR(40)

#
CREATE VIEW large AS SELECT * FROM city WHERE population > 1000000

#
SELECT CAST(price AS DECIMAL(8, 2)), EXTRACT(YEAR FROM placed), SUBSTRING(name, 1, 3), TRIM(name) FROM item

#
SELECT * FROM (VALUES (1, 'a'), (2, 'b')) AS t (id, name)

#
SELECT COUNT(DISTINCT customer_id) AS n FROM orders WHERE placed >= '2024-01-01' AND placed < '2024-02-01'; SELECT 1

# postgres
SELECT E'a\nb', $$it's$$, U&'d', 'x' COLLATE "C" FROM t WHERE id = ANY($1) AND (a, b) IN (SELECT c, d FROM u)

# postgres
SELECT name, lag(value) OVER w, first_value(value) OVER w FROM m WINDOW w AS (PARTITION BY name ORDER BY at)

# mysql
WITH RECURSIVE days AS (SELECT DATE('2024-01-01') AS d UNION ALL SELECT d + INTERVAL 1 DAY FROM days WHERE d < '2024-01-31') SELECT d FROM days

# mysql
DELETE o FROM orders o LEFT JOIN customer c ON c.id = o.customer WHERE c.id IS NULL

# bigquery
SELECT * FROM t UNPIVOT (sales FOR quarter IN (q1, q2, q3))

# snowflake
SELECT * FROM t1 ASOF JOIN t2 MATCH_CONDITION (t1.at >= t2.at) ON t1.sym = t2.sym

# tsql
SELECT * FROM p UNPIVOT (amount FOR month IN ([jan], [feb])) AS u

# tsql
WITH numbered AS (SELECT *, ROW_NUMBER() OVER (PARTITION BY [email] ORDER BY [id]) AS n FROM [users]) DELETE FROM numbered WHERE n > 1

# oracle
SELECT q'[it's]' AS quoted, INTERVAL '3' DAY AS wait FROM dual WHERE ROWNUM = 1

# oracle
WITH r (n) AS (SELECT 1 FROM dual UNION ALL SELECT n + 1 FROM r WHERE n < 10) SELECT n FROM r

# spark
SELECT * FROM a FULL OUTER JOIN b USING (id) WHERE a.x <=> b.x

# hive
FROM src INSERT OVERWRITE TABLE a SELECT k WHERE v > 1

# duckdb
SELECT * FROM t1 POSITIONAL JOIN t2

# clickhouse
WITH 10 AS most SELECT x FROM t WHERE x < most

# postgres
SELECT name FROM city TABLESAMPLE SYSTEM (10) REPEATABLE (42) WHERE tags ?| ARRAY['a', 'b']
