// Events of an episode: agents that left or returned, who gained by it, and the end.

const NAMED = 3; // agents named in the text of one event

// "a, b, c and 7 more"
function joinNames(names, agents) {
  const named = agents.slice(0, NAMED).map((agent) => names[agent]);
  const more = agents.length - named.length;
  if (more) return `${named.join(", ")} and ${more} more`;
  return named.length > 1 ? `${named.slice(0, -1).join(", ")} and ${named.at(-1)}` : named[0];
}

// What one step did: {step, agents, text} each. was, is: agent -> whether it is active before and after the step;
// terminated, truncated: agent -> flag of the step; reward, before: agent -> reward of the step, and of the one before.
function stepEvents(step, names, { was, is, terminated, truncated, reward, before }) {
  const agents = names.map((_, agent) => agent);
  const active = agents.filter(was);
  const gone = active.filter((agent) => terminated(agent) || truncated(agent) || !is(agent));
  const cut = gone.filter((agent) => truncated(agent) && !terminated(agent));
  const left = gone.filter((agent) => !cut.includes(agent));
  const back = agents.filter((agent) => !was(agent) && is(agent));
  const events = [];
  const add = (agents, text) => events.push({ step, agents, text });
  if (active.length && gone.length === active.length && !back.length) {
    const how = [left.length && "terminated", cut.length && "truncated"].filter(Boolean);
    const each = how.length > 1 ? `${left.length} terminated, ${cut.length} truncated` : how[0];
    const ended = active.length > 1 ? `the episode ended: ${each} (${active.length} agents)` : `the episode ended: ${each}`;
    add([...left, ...cut], ended + (left.length ? gain(names, active, reward, before) : ""));
  } else {
    const others = active.filter((agent) => !gone.includes(agent));
    if (left.length) add(left, `${joinNames(names, left)} left${gain(names, others, reward, before)}`);
    if (cut.length) add(cut, `${joinNames(names, cut)} left: truncated`);
  }
  if (back.length) add(back, `${joinNames(names, back)} returned`);
  return events;
}

// Who did it: those of the agents whose reward is positive and greater than in the step before.
function gain(names, agents, reward, before) {
  const found = agents.filter((agent) => reward(agent) > Math.max(0, before(agent)));
  if (!found.length || names.length === 1) return "";
  const gains = found.map(reward);
  const each = gains.every((one) => one === gains[0]) ? ` +${formatNumber(gains[0])}` : "";
  return `; ${joinNames(names, found)}${each}`;
}
