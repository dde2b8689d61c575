-- missing: which of these entries are no longer in a stream (removed by XDEL, taken by another batcher, or committed
-- without the caller having read of it).
--
-- KEYS  1 a stream
-- ARGV  entry IDs
-- Returns the IDs that are not in the stream. O(entries), and O(bytes) of those that are: call it rarely.
local missing = {}
for _, id in ipairs(ARGV) do
  if #redis.call('XRANGE', KEYS[1], id, id) == 0 then missing[#missing + 1] = id end
end
return missing
