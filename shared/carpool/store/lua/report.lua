-- report: publish the active batcher's report about itself, for `carpool top` and other observers; or the detail of a
-- model, or the answer to a question.
--
-- KEYS  1 report, detail or answer
-- ARGV  1 the text  2 its TTL (ms)
-- O(1).
-- GRANT batcher report set del
-- GRANT batcher detail,answer set del
redis.call('DEL', KEYS[1]) -- must be the first write: see deliver.lua. A report matters most when memory is full
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
