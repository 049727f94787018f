// The state of an environment as a game's `draw` takes it.

function drawnState(env, index = 0) {
  const state = {};
  const add = (name, dtype, shape, values) => {
    const plain = dtype === "bool" ? (value) => value !== 0 : Number;
    const kind = dtype === "bool" ? "b" : dtype.startsWith("float") ? "f" : "i";
    state[name] = new NDArray(Array.from(values, plain), shape, kind);
  };
  const row = ({ name, shape, shared }) => {
    const [array, length] = [env.state[name.replace(/^state_/, "")], product(shape)];
    return shared ? array : array.subarray(index * length, (index + 1) * length);
  };
  const field = (wanted) => env.layout.fields.find(({ name }) => name === wanted);
  add("elapsed_steps", "int32", [], row(field("engine_elapsed_steps")));
  add("active", "bool", [env.layout.num_agents], row(field("engine_active")));
  for (const one of env.layout.fields) {
    if (one.name.startsWith("state_")) add(one.name.slice("state_".length), one.dtype, one.shape, row(one));
  }
  return state;
}
