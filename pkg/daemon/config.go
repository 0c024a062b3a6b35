package daemon

import (
	"cmp"
	"encoding"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"reflect"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/cosmicac/cosmicac/pkg/fault"
)

// maxConfigBytes bounds a configuration file.
const maxConfigBytes = 1 << 20

// Validator is implemented by configurations with rules of their own. It names
// every key that breaks one, all at once. Field is the key's path: "http.listen".
type Validator interface{ Validate() []fault.Detail }

// loadConfig reads defaults, then the file, then the environment, and validates.
// A missing file is an error only if required. Unused are the variables that look
// like ours and name no key.
func loadConfig[C any](service, path string, required bool, environ []string, defaults func() C, base func(*C) *Base) (cfg C, unused []string, err error) {
	cfg = defaults()
	data, err := readConfig(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && !required:
	case err != nil:
		return cfg, nil, fault.Wrap(fault.Invalid, err, "read configuration")
	default:
		// An empty file decodes to nothing rather than to an error.
		err := yaml.UnmarshalWithOptions(data, &cfg, yaml.DisallowUnknownField())
		if err != nil && !errors.Is(err, io.EOF) {
			return cfg, nil, atLine(path, err)
		}
	}
	unused, err = applyEnvironment(reflect.ValueOf(&cfg).Elem(), environ)
	if err != nil {
		return cfg, nil, err
	}
	b := base(&cfg)
	b.fill(service)
	faults := b.validate()
	if v, ok := any(&cfg).(Validator); ok {
		faults = append(faults, v.Validate()...)
	} else if v, ok := any(cfg).(Validator); ok {
		faults = append(faults, v.Validate()...)
	}
	if len(faults) > 0 {
		slices.SortStableFunc(faults, func(a, b fault.Detail) int { return cmp.Compare(a.Field, b.Field) })
		return cfg, nil, fault.New(fault.Invalid, "the configuration breaks %d rules", len(faults)).With(faults...)
	}
	return cfg, unused, nil
}

func readConfig(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxConfigBytes+1))
	if err == nil && len(data) > maxConfigBytes {
		err = fmt.Errorf("%s is larger than %d bytes", path, maxConfigBytes)
	}
	return data, err
}

// atLine puts file, line and column before the parser's words, without the
// excerpt of the file, which may hold secrets.
func atLine(path string, err error) error {
	var y yaml.Error
	if !errors.As(err, &y) {
		return fault.New(fault.Invalid, "%s: %s", path, err)
	}
	at := path
	if t := y.GetToken(); t != nil && t.Position != nil {
		at = fmt.Sprintf("%s:%d:%d", path, t.Position.Line, t.Position.Column)
	}
	var unknown *yaml.UnknownFieldError
	if errors.As(err, &unknown) && unknown.Token != nil {
		return fault.New(fault.Invalid, "%s: unknown key %q", at, unknown.Token.Value)
	}
	return fault.New(fault.Invalid, "%s: %s", at, y.GetMessage())
}

// environmentPrefix begins every variable that overrides a key: COSMICAC_MESH_LISTEN
// is mesh.listen.
const environmentPrefix = "COSMICAC_"

func applyEnvironment(cfg reflect.Value, environ []string) (unused []string, err error) {
	values := make(map[string]string)
	for _, e := range environ {
		if k, v, ok := strings.Cut(e, "="); ok && strings.HasPrefix(k, environmentPrefix) {
			values[k] = v
		}
	}
	if len(values) == 0 {
		return nil, nil
	}
	var faults []fault.Detail
	eachKey(cfg, nil, func(path []string, v reflect.Value) {
		name := environmentPrefix + strings.ToUpper(strings.Join(path, "_"))
		text, ok := values[name]
		if !ok {
			return
		}
		delete(values, name)
		if err := setText(v, text); err != nil {
			// The value may be a secret: only the name is told.
			faults = append(faults, fault.Detail{Field: name, Rule: "is not a " + v.Type().String() + " for key " + strings.Join(path, ".")})
		}
	})
	for name := range values {
		unused = append(unused, name)
	}
	slices.Sort(unused)
	if len(faults) > 0 {
		return nil, fault.New(fault.Invalid, "the environment breaks %d rules", len(faults)).With(faults...)
	}
	return unused, nil
}

var textUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()

// eachKey visits every key of a configuration with its path of YAML names. A struct
// is visited itself only if it reads its own text.
func eachKey(v reflect.Value, path []string, visit func([]string, reflect.Value)) {
	if v.Kind() != reflect.Struct || reflect.PointerTo(v.Type()).Implements(textUnmarshaler) {
		visit(path, v)
		return
	}
	for i := range v.NumField() {
		f := v.Type().Field(i)
		if !f.IsExported() {
			continue
		}
		name, options, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		switch {
		case name == "-":
		case f.Anonymous && name == "", strings.Contains(options, "inline"):
			eachKey(v.Field(i), path, visit)
		default:
			if name == "" {
				name = strings.ToLower(f.Name)
			}
			eachKey(v.Field(i), append(slices.Clone(path), name), visit)
		}
	}
}

// setText takes a string as it is, a list of strings separated by commas, and
// anything else as YAML.
func setText(v reflect.Value, text string) error {
	switch {
	case v.Kind() == reflect.String && !v.Addr().Type().Implements(textUnmarshaler):
		v.SetString(text)
		return nil
	case v.Type() == reflect.TypeFor[[]string]() && !strings.HasPrefix(strings.TrimSpace(text), "["):
		list := []string{}
		for _, s := range strings.Split(text, ",") {
			if s = strings.TrimSpace(s); s != "" {
				list = append(list, s)
			}
		}
		v.Set(reflect.ValueOf(list))
		return nil
	}
	fresh := reflect.New(v.Type())
	if err := yaml.UnmarshalWithOptions([]byte(text), fresh.Interface(), yaml.DisallowUnknownField()); err != nil {
		return err
	}
	v.Set(fresh.Elem())
	return nil
}
