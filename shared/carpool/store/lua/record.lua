-- Records: what became of requests whose results are read by ID (see keep.lua). Three words with a space between two:
-- the fingerprint of the request, its state, and for how long its result is kept (ms), or '-' if its model decides.
-- A program may read it to know the state. Whoever may write it is a producer: nothing in it may stop a script.
-- GRANT batcher,worker kept get set pttl

local RECORD_TTL_DIGITS_MAX = 15

-- parse_record(key): fingerprint and milliseconds, nil if the model decides; nothing if there is no record. O(1).
local function parse_record(key)
  local record = redis.pcall('GET', key)
  local fingerprint, ttl = string.match(type(record) == 'string' and record or '', '^(%S+) %S+ (%S+)$')
  local is_number = fingerprint and #ttl <= RECORD_TTL_DIGITS_MAX and string.match(ttl, '^%d*[1-9]%d*$')
  return fingerprint, is_number and tonumber(ttl) or nil
end

local function record_of(fingerprint, state, ttl_ms)
  return fingerprint .. ' ' .. state .. ' ' .. (ttl_ms and string.format('%.0f', ttl_ms) or '-')
end

-- mark_in_flight(key, ttl_ms_max): the request of this record is dispatched; its model keeps no result longer. O(1).
local function mark_in_flight(key, ttl_ms_max)
  local fingerprint, ttl_ms = parse_record(key)
  if not fingerprint then return end
  if ttl_ms then ttl_ms = math.min(ttl_ms, ttl_ms_max) end
  redis.call('SET', key, record_of(fingerprint, 'in-flight', ttl_ms), 'KEEPTTL')
end

-- find_record(replies): the record of the request whose result goes to this reply stream, which has its name; nil if
-- there is none. O(1).
local function find_record(replies)
  local key = string.gsub(replies, '^(.*}:)replies:', '%1kept:', 1)
  local fingerprint, ttl_ms = parse_record(key)
  return fingerprint and { key = key, fingerprint = fingerprint, ttl_ms = ttl_ms }
end

-- settle_record(record, state, ttl_ms): its request has its result: 'done', 'failed' or 'dead'. `ttl_ms`: the model's.
-- Returns for how long the result is kept; the record is kept at least as long. O(1).
local function settle_record(record, state, ttl_ms)
  local kept_ms = record.ttl_ms or tonumber(ttl_ms)
  local left_ms = math.max(kept_ms, redis.call('PTTL', record.key))
  local text = record_of(record.fingerprint, state, record.ttl_ms)
  redis.call('SET', record.key, text, 'PX', string.format('%.0f', left_ms))
  return string.format('%.0f', kept_ms)
end
