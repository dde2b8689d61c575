-- assign: batches of a bound model that were dispatched, and that no consumer has yet, go into the pending lists of the
-- processes that they are for, as if these had fetched them. Each process does so for all: one that died before it read
-- its inbox would else never have its batch, which is reclaimed as any other then. With JUSTID, XCLAIM does not raise
-- the delivery count, which is the epoch.
--
-- A batch that names no process was added before the model was a bound one: the caller has it from now on.
--
-- KEYS  1 batches
-- ARGV  1 consumer
-- Returns the number of batches. O(bytes of these batches).
-- GRANT worker batches xreadgroup xclaim
local COUNT, number = 100, 0
local fetch = { 'XREADGROUP', 'GROUP', 'workers', ARGV[1], 'COUNT', COUNT, 'STREAMS', KEYS[1], '>' }
while true do
  local fetched = redis.call(unpack(fetch))
  local entries = fetched and fetched[1] and fetched[1][2] or {}
  for _, entry in ipairs(entries) do
    local fields = entry[2]
    for f = 1, #fields, 2 do
      if fields[f] == 'process' and fields[f + 1] ~= '' and fields[f + 1] ~= ARGV[1] then
        redis.call('XCLAIM', KEYS[1], 'workers', fields[f + 1], 0, entry[1], 'JUSTID')
      end
    end
  end
  number = number + #entries
  if #entries < COUNT then return number end
end
