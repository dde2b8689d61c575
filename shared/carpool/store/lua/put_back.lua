-- put_back(requests, tickets, take): add entries with the requests of a removed entry that are still waiting. They
-- keep their arrival and the ranges of their tickets (in one string, separated by spaces, '' if none), which are in
-- the new entry's field `tickets`. Arguments are read with `take`: the arrival (ms); list of entries: the payload, the
-- tickets.
-- Returns the IDs of the new entries. O(ranges of tickets), and O(bytes).
-- GRANT batcher requests xadd
local function put_back(requests, tickets, take)
  local arrival_ms, ids = take(), {}
  for e = 1, tonumber(take()) do
    local payload, ranges = take(), take()
    if ranges == '' then
      ids[e] = redis.call('XADD', requests, '*', 'requests', payload, 'arrival', arrival_ms)
    else
      ids[e] = redis.call('XADD', requests, '*', 'requests', payload, 'arrival', arrival_ms, 'tickets', ranges)
      for range in string.gmatch(ranges, '%S+') do
        mark_waiting(tickets, range, ids[e])
      end
    end
  end
  return ids
end

-- skip_put_back(take): read the same arguments without putting anything back. O(entries).
local function skip_put_back(take)
  take()
  for _ = 1, 2 * tonumber(take()) do take() end
end
