-- missing: which of these entries are no longer in a stream (withdrawn, settled unseen, deleted by hand).
--
-- KEYS  1 a stream
-- ARGV  entry IDs
-- Returns the IDs that are not there. O(entries), and O(bytes) of those that are: ask rarely.
local missing = {}
for _, id in ipairs(ARGV) do
  if #redis.call('XRANGE', KEYS[1], id, id) == 0 then missing[#missing + 1] = id end
end
return missing
