-- Statistics of a model: a hash of counters, in which each script that writes results counts them. So a request is
-- counted once, when its result is written, whatever process ends before or after. PROTOCOL.md lists the fields.
--
-- A user may make the key or a field anything, so no command may raise: then nothing is counted. Durations are in
-- microseconds. A number may be text. All are O(1).
-- GRANT batcher,worker statistics hincrby
-- GRANT worker statistics hset
local SIZES_COUNTED_MAX = 128  -- batches of more requests are counted by the next power of two: fields are few

-- count_succeeded(statistics, number, total_us, queue_us, settled_us): requests that succeeded, and their time from
-- arrival to result, and that in the queue, added up.
local function count_succeeded(statistics, number, total_us, queue_us, settled_us)
  redis.pcall('HINCRBY', statistics, 'success', number)
  redis.pcall('HINCRBY', statistics, 'success_us', total_us)
  redis.pcall('HINCRBY', statistics, 'queue_us', queue_us)
  redis.pcall('HSET', statistics, 'last_us', settled_us)
end

-- count_batches(statistics, size, number, input_us, infer_us, output_us): batches in which so many requests
-- succeeded, and their times before, in and after the model, added up.
local function count_batches(statistics, size, number, input_us, infer_us, output_us)
  local at_most = size
  if tonumber(size) > SIZES_COUNTED_MAX then
    at_most = 2 * SIZES_COUNTED_MAX
    while at_most < tonumber(size) do at_most = 2 * at_most end
    redis.pcall('HINCRBY', statistics, 'requests:' .. at_most, size * number)
  end
  redis.pcall('HINCRBY', statistics, 'batches:' .. at_most, number)
  redis.pcall('HINCRBY', statistics, 'input_us:' .. at_most, input_us)
  redis.pcall('HINCRBY', statistics, 'infer_us:' .. at_most, infer_us)
  redis.pcall('HINCRBY', statistics, 'output_us:' .. at_most, output_us)
end

-- count_streams(statistics, number, chunks, first_us, later_us): streams that ended, their chunks, and the times from
-- arrival to the first chunks, and from these to the last ones, added up.
local function count_streams(statistics, number, chunks, first_us, later_us)
  redis.pcall('HINCRBY', statistics, 'streams', number)
  redis.pcall('HINCRBY', statistics, 'chunks', chunks)
  redis.pcall('HINCRBY', statistics, 'first_us', first_us)
  redis.pcall('HINCRBY', statistics, 'later_us', later_us)
end

-- count_failed(statistics, number, total_us): requests with errors as their results.
local function count_failed(statistics, number, total_us)
  redis.pcall('HINCRBY', statistics, 'fail', number)
  redis.pcall('HINCRBY', statistics, 'fail_us', total_us)
end
