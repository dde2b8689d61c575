-- put_back(requests, held, payload, arrival_ms, tickets): add a new entry with the requests of a removed entry that
-- are still waiting. They keep their arrival and their tickets (one string, separated by spaces, '' if none), which are
-- in the new entry's field `slots`.
-- Returns the new entry's ID. O(tickets), and O(bytes).
local function put_back(requests, held, payload, arrival_ms, tickets)
  if tickets == '' then
    return redis.call('XADD', requests, '*', 'requests', payload, 'arrival', arrival_ms)
  end
  local id = redis.call('XADD', requests, '*', 'requests', payload, 'arrival', arrival_ms, 'slots', tickets)
  for ticket in string.gmatch(tickets, '%S+') do update_ticket(held, ticket, waiting_in(id)) end
  return id
end

