module @all_reduce attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 4 : i32} {
  func.func public @main(%arg0: tensor<4x16x128xbf16> {tf.aliasing_output = 0 : i32}) -> (tensor<4x16x128xbf16>) {
    %0 = "stablehlo.all_to_all"(%arg0) {split_dimension = 0 : i64, concat_dimension = 0 : i64, split_count = 4 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<4x16x128xbf16>) -> tensor<4x16x128xbf16>
    %1 = stablehlo.convert %0 : (tensor<4x16x128xbf16>) -> tensor<4x16x128xf32>
    %2 = stablehlo.constant dense<-0.0> : tensor<f32>
    %3 = stablehlo.reduce(%1 init: %2) applies stablehlo.add across dimensions = [0] : (tensor<4x16x128xf32>, tensor<f32>) -> tensor<16x128xf32>
    %4 = stablehlo.convert %3 : (tensor<16x128xf32>) -> tensor<16x128xbf16>
    %5 = stablehlo.reshape %4 : (tensor<16x128xbf16>) -> tensor<1x16x128xbf16>
    %6 = "stablehlo.all_gather"(%5) {all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>} : (tensor<1x16x128xbf16>) -> tensor<4x16x128xbf16>
    return %6 : tensor<4x16x128xbf16>
  }
}
